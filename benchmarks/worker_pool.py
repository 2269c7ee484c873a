"""Ranks of one library that live for a whole benchmark and run what is requested of them.

    with two_hosts.hosts("1gbit") as names, WorkerPool("ddp", 2, names) as ours:
        ours.ask("train", name="bare", steps=3)    # every rank's answer, while the others wait in a read

Requests are the methods of `training_worker.Worker`. When the benchmark ends, however it does, its connections close
and the ranks end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks import harness, two_hosts

STARTING = 60.0  # s
TURN = 300.0  # s
ENDING = 30.0  # s
Answers = list[dict[str, Any]]


def libraries(alone: bool = False) -> list[str]:
    """Ours, and PyTorch if it is installed and wanted."""
    return ["ddp", "torch"] if not alone and harness.has_torch() else ["ddp"]


class WorkerPool:
    """Ranks of one library.

    library: ddp or torch; size: how many; hosts: one for each, as `two_hosts.hosts` names them; None: this machine,
    where ours are started by `ddp-launch`, or as one process.

    Raises: SystemExit, here and at every request, if a rank fails or does not answer.
    """

    def __init__(self, library: str, size: int, hosts: list[str] | None = None) -> None:
        self.library, self.size = library, size
        self._stack = contextlib.ExitStack()
        self._lines: list[Any] = []
        try:
            self._start(hosts)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def ask(self, do: str, **what: Any) -> Answers:
        """What each rank answers, in the order of ranks."""
        self._send({"do": do, **what})
        return self._receive()

    def slowest(self, do: str, **what: Any) -> dict[str, float]:
        """The largest number of each kind that the ranks answer."""
        answers = self.ask(do, **what)
        numbers = [key for key, value in answers[0].items() if isinstance(value, int | float)]
        return {key: max(each[key] for each in answers) for key in numbers}

    def finish(self, name: str, reduced: bool) -> None:
        """Checks that ranks have the same parameters if gradients were reduced, and drops the implementation."""
        same = len({each["digest"] for each in self.ask("digest", name=name)}) == 1
        if same != (reduced or self.size == 1):  # ranks have different samples
            raise SystemExit(f"{self.library}, {name}: gradients were {'not ' if reduced else ''}reduced")
        self.ask("drop", name=name)

    def _start(self, hosts: list[str] | None) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        path = str(Path(folder, "socket"))
        listener.bind(path)
        listener.listen(self.size)
        listener.settimeout(STARTING)
        environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1"}
        if hosts is not None:
            environ["GLOO_SOCKET_IFNAME"] = "eth0"
        for command in commands(self.library, self.size, hosts, path):
            process = subprocess.Popen(
                command, cwd=harness.ROOT, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._stack.callback(_end, process)
        for _ in range(self.size):
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                raise SystemExit(f"not all ranks of {self.library} connected within {STARTING:g} s") from None
            stream.settimeout(TURN)
            self._stack.callback(stream.close)
            self._lines.append(self._stack.enter_context(stream.makefile("rw")))
        answers = self._receive()
        if "port" in answers[0]:
            self._send({"port": next(each["port"] for each in answers if each["port"] is not None)})
            answers = self._receive()
        if sorted(each["rank"] for each in answers) != list(range(self.size)):
            raise SystemExit(f"{self.size} ranks of {self.library} do not know each other: {answers}")
        ordered = sorted(zip(answers, self._lines, strict=True), key=lambda pair: pair[0]["rank"])
        self._lines = [lines for _, lines in ordered]

    def _send(self, what: dict[str, Any]) -> None:
        for lines in self._lines:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

    def _receive(self) -> Answers:
        answers = []
        for lines in self._lines:
            try:
                answers.append(json.loads(lines.readline()))
            except (OSError, ValueError):
                raise SystemExit(f"a rank of {self.library} ended, or did not answer for {TURN:g} s") from None
            if "error" in answers[-1]:
                raise SystemExit(f"a rank of {self.library}: {answers[-1]['error']}")
        return answers


def _end(process: subprocess.Popen[bytes]) -> None:
    """The connections are closed, so ranks end by themselves; those that hang are killed."""
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def commands(library: str, size: int, hosts: list[str] | None, path: str) -> list[list[str]]:
    """What starts the ranks: one command for a job, or one for each rank."""
    address = "127.0.0.1" if hosts is None else two_hosts.ADDRESS
    rank = ["-m", "benchmarks.training_worker", library, path, address]
    if library == "torch":
        at = [[str(two_hosts.SCRIPT), host] for host in hosts] if hosts else [[]] * size
        return [[*each, sys.executable, *rank, str(number), str(size)] for number, each in enumerate(at)]
    if hosts is not None:
        return [[*two_hosts.start(hosts), *rank, "-1", str(size)]]
    launch = ["-m", "launcher", "-n", str(size)] if size > 1 else []
    return [[sys.executable, *launch, *rank, "-1", str(size)]]
