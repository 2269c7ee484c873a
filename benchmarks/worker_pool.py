"""Ranks of one library that stay for a whole benchmark and run what they are asked to run.

    with two_hosts.hosts("1gbit") as names, WorkerPool("ddp", 2, names) as ours:
        ours.ask("train", name="bare", steps=3)    # every rank's answer, while the others wait in a read

What a rank does is told in `training_worker.py`. When the benchmark ends, however it does, its connections close and
the ranks end.
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

from benchmarks import two_hosts

ROOT = Path(__file__).resolve().parent.parent
STARTING = 60.0  # s
TURN = 300.0  # s
ENDING = 30.0  # s
Answers = list[dict[str, Any]]


class WorkerPool:
    """Ranks of one library.

    library: ddp or torch; size: how many; hosts: one for each, as `two_hosts.hosts` names them; None: this machine,
    where ours are started by `ddp-launch`, or alone.

    Raises: SystemExit, here and whenever they are asked, if a rank fails or does not answer.
    """

    def __init__(self, library: str, size: int, hosts: list[str] | None = None) -> None:
        self.library, self.size = library, size
        self.turns: list[Answers] = []
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
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
        self._tell({"do": do, **what})
        answers = self._hear()
        self.turns.append(answers)
        return answers

    def slowest(self, do: str, **what: Any) -> dict[str, float]:
        """The largest number of each kind that the ranks answer."""
        answers = self.ask(do, **what)
        return {
            key: max(each[key] for each in answers)
            for key, value in answers[0].items()
            if isinstance(value, (int, float))
        }

    def agree(self, name: str) -> bool:
        """True if an implementation has the same parameters on all ranks, bit by bit: its gradients were reduced."""
        return len({each["digest"] for each in self.ask("digest", name=name)}) == 1

    def idle(self) -> float:
        """The share of its core that a rank takes between its turns, while others have theirs."""
        waits = [each for answers in self.turns for each in answers if each["idle"] > 0.5]
        return max((each["idle_cpu"] / each["idle"] for each in waits), default=0.0)

    def _start(self, hosts: list[str] | None) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        path = str(Path(folder, "door"))
        door.bind(path)
        door.listen(self.size)
        door.settimeout(STARTING)
        self._stack.callback(self._end)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if hosts is not None:
            environ["GLOO_SOCKET_IFNAME"] = "eth0"
        for command in commands(self.library, self.size, hosts, path):
            self._processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
            )
        for _ in range(self.size):
            try:
                stream, _ = door.accept()
            except TimeoutError:
                raise SystemExit(f"not all ranks of {self.library} came within {STARTING:g} s") from None
            stream.settimeout(TURN)
            self._stack.callback(stream.close)
            self._lines.append(self._stack.enter_context(stream.makefile("rw")))
        said = self._hear()
        if "port" in said[0]:
            port = next(each["port"] for each in said if each["port"] is not None)
            self._tell({"port": port})
            said = self._hear()
        if sorted(each["rank"] for each in said) != list(range(self.size)):
            raise SystemExit(f"{self.size} ranks of {self.library} do not know each other: {said}")
        ordered = sorted(zip(said, self._lines, strict=True), key=lambda pair: pair[0]["rank"])
        self._lines = [lines for _, lines in ordered]
        self.versions: dict[str, str] = ordered[0][0]["versions"]
        self.cores: list[int] = [each["core"] for each, _ in ordered]

    def _tell(self, what: dict[str, Any]) -> None:
        for lines in self._lines:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

    def _hear(self) -> Answers:
        answers = []
        for lines in self._lines:
            try:
                answers.append(json.loads(lines.readline()))
            except (OSError, ValueError):
                raise SystemExit(f"a rank of {self.library} went, or did not answer for {TURN:g} s") from None
            if "error" in answers[-1]:
                raise SystemExit(f"a rank of {self.library}: {answers[-1]['error']}")
        return answers

    def _end(self) -> None:
        # The connections are closed: ranks that are well go by themselves.
        for process in self._processes:
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def commands(library: str, size: int, hosts: list[str] | None, path: str) -> list[list[str]]:
    """What starts the ranks: a job, or each of them."""
    address = "127.0.0.1" if hosts is None else two_hosts.ADDRESS
    rank = ["-m", "benchmarks.training_worker", library, path, address]
    if library == "torch":
        start = [
            [sys.executable] if hosts is None else [str(two_hosts.SCRIPT), host, sys.executable]
            for host in hosts or [""] * size
        ]
        return [[*each, *rank, str(number), str(size)] for number, each in enumerate(start)]
    if hosts is not None:
        return [[*two_hosts.start(hosts), *rank, "-1", str(size)]]
    launch = ["-m", "launcher", "-n", str(size)] if size > 1 else []
    return [[sys.executable, *launch, *rank, "-1", str(size)]]
