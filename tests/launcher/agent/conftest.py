"""A real agent and its rank, driven by the test in the place of the launcher: no engine, no launcher, no guess."""

from __future__ import annotations

import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.linux import stat_of
from launcher.protocol import ADDRESS, SECRET, Channel, Message, to_bytes
from launcher.supervisor.listener import Listener
from tests.conftest import ROOT, wait_until

AGENT = ROOT / "launcher/agent/main.py"
LIMIT = 15.0  # s


class Kept:
    """What the launcher is to one agent.

    hello: what it said of its rank; heard: all messages since, but for output; out, err: that
    """

    def __init__(self, job: Any, channel: Channel, hello: Message) -> None:
        self.job = job
        self.channel = channel
        self.hello = hello
        self.pid = int(hello["pid"])
        self.heard: list[Message] = []
        self.out = self.err = b""

    def send(self, **order: object) -> None:
        """Sends an order."""
        self.channel.send(order)

    def until(self, done: Callable[[], Any], limit: float = LIMIT) -> Any:
        """Listens until `done()` is true, and returns it."""
        deadline = time.monotonic() + limit
        while not (result := done()):
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self.channel], [], [], left)[0]:
                pytest.fail(f"waited {limit} s; heard {self.heard[-5:]}, out {self.out!r}, err {self.err!r}")
            self.channel.flush()
            messages = self.channel.receive()
            if messages is None:
                pytest.fail(f"the agent has gone; heard {self.heard[-5:]}, out {self.out!r}, err {self.err!r}")
            for message in messages:
                self.out += to_bytes(message.get("out", ""))
                self.err += to_bytes(message.get("err", ""))
                if message.keys().isdisjoint(("out", "err")):
                    self.heard.append(message)
        return result

    def next(self, kind: str, limit: float = LIMIT, where: Callable[[Any], Any] = lambda said: True) -> Any:
        """What the next message of this kind says, taken off what was heard. where: it must be so"""

        def take() -> list[Any]:
            for index, message in enumerate(self.heard):
                if kind in message and where(message[kind]):
                    return [self.heard.pop(index)]
            return []

        return self.until(take, limit)[0][kind]

    def says(self, word: str) -> None:
        """Waits until the rank has printed a word, and forgets all until then."""
        self.until(lambda: word.encode() in self.out)
        self.out = self.out.partition(word.encode())[2]

    def end(self) -> Message:
        """Waits for the rank's end, lets go of the agent, and returns what it said of the end."""
        message = self.until(lambda: next((message for message in self.heard if "end" in message), None))
        self.send(release=True)
        self.job.wait(5)
        return dict(message)


@pytest.fixture
def keep(start_job: Any, tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    """Starts an agent whose rank runs these lines, and returns once it has said who it is.

    engine: a command that starts the one which follows it
    """
    listener = Listener()
    channels = []

    def start(body: str, engine: Sequence[str] = (), **environ: str) -> Kept:
        script = tmp_path / "kept.py"
        script.write_text("import os, signal, subprocess, sys, threading, time\n" + textwrap.dedent(body))
        ours = {ADDRESS: listener.address, SECRET: listener.secret, **environ}
        job = start_job([*engine, sys.executable, str(AGENT), str(script)], env=ours)
        deadline = time.monotonic() + LIMIT
        while True:
            readable = select.select(list(listener.filenos()), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not readable:
                pytest.fail(f"no agent came; {job.process.poll()}")
            for fileno in readable:
                news = listener.serve(fileno)
                if news is not None:
                    channels.append(news[0])
                    return Kept(job, *news)

    yield start
    for channel in channels:
        channel.close()
    listener.close()


@pytest.fixture
def becomes() -> Callable[[int, str], None]:
    """Waits until a process is in one of these states."""

    return lambda pid, states: wait_until(lambda: stat_of(pid).state in {*states}, LIMIT)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: Any) -> None:
    for name in list(os.environ):
        if name.startswith(("PMI_", "OMPI_COMM_WORLD_", "SLURM_")):
            monkeypatch.delenv(name)
