"""Processes that live for a whole benchmark and run what is requested of them, one request at a time.

    with WorkerPool(lambda path: [[sys.executable, "-m", "benchmarks.some_worker", path]]) as pool:
        pool.request("train", steps=3)    # every process's answer

Each process calls `serve(path, worker)`: requests are the methods of `worker`. `RankPool` has the ranks of one library
(`training_worker.py`). When the benchmark ends, however it does, connections close and the processes end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from benchmarks import harness, two_hosts

STARTING = 60.0  # s
TURN = 300.0  # s
ENDING = 30.0  # s
Answers = list[Any]


class WorkerError(SystemExit):
    """A process failed, or did not answer in time. Ends a benchmark that does not handle it with one sentence."""


class WorkerPool:
    """Processes that serve requests.

    commands: what starts them, given the path of the socket that they connect to; size: how many connect, if not one a
    command; patience: seconds after which a process that does not end is killed

    Raises: WorkerError, here and at every request, if a process fails or does not answer.
    """

    def __init__(
        self,
        commands: Callable[[str], Sequence[Sequence[str]]],
        size: int | None = None,
        name: str = "a worker",
        patience: float = ENDING,
        **environ: str,
    ) -> None:
        self.name = name
        self._stack = contextlib.ExitStack()
        self._connections: list[Connection] = []
        with contextlib.ExitStack() as starting:
            starting.callback(self._stack.close)
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            path = str(Path(folder, "socket"))
            listener.bind(path)
            listener.listen()
            listener.settimeout(STARTING)
            environ = {**os.environ, "PYTHONPATH": harness.python_path(harness.ROOT), **environ}
            self._processes = [
                subprocess.Popen(
                    command, cwd=harness.ROOT, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
                )
                for command in commands(path)
            ]
            for process in self._processes:
                self._stack.callback(_end, process, patience)
            for _ in range(size or len(self._processes)):
                try:
                    stream, _ = listener.accept()
                except TimeoutError:
                    raise WorkerError(f"{name} did not connect within {STARTING:g} s") from None
                stream.setblocking(True)
                self._connections.append(self._stack.enter_context(Connection(stream.detach())))
            starting.pop_all()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes."""
        self._stack.close()

    def request(self, do: str, **arguments: Any) -> Answers:
        """What each process answers, in their order."""
        self.send(do, **arguments)
        return self.receive()

    def send(self, do: str, **arguments: Any) -> None:
        """Requests it of every process, without waiting for the answers."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended, which `receive` reports
                connection.send((do, arguments))

    def receive(self, limit: float = TURN) -> Answers:
        """The answers to the last request. limit: seconds that each may take"""
        answers = []
        for connection in self._connections:
            try:
                answer, error = connection.recv() if connection.poll(limit) else (None, f"no answer for {limit:.0f} s")
            except (EOFError, OSError):
                answer = None
                error = "it has ended"
            if error:
                raise WorkerError(f"{self.name}: {error}")
            answers.append(answer)
        return answers


def serve(path: str, worker: object) -> None:
    """Answers requests until the benchmark ends."""
    with contextlib.suppress(EOFError, OSError), Client(path) as connection:
        while True:
            do, arguments = connection.recv()
            try:
                connection.send((getattr(worker, do)(**arguments), ""))
            except Exception:
                connection.send((None, traceback.format_exc()))


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """The connections are closed, so processes end by themselves; those that hang are killed."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class RankPool(WorkerPool):
    """Ranks of one library.

    library: ddp or torch; size: how many; hosts: one for each, as `two_hosts.hosts` names them; None: this machine,
    where ours are started by `ddp-launch`, or as one process.
    """

    def __init__(self, library: str, size: int, hosts: list[str] | None = None) -> None:
        self.library = library
        self.size = size
        environ = {"OMP_NUM_THREADS": "1"} | ({} if hosts is None else {"GLOO_SOCKET_IFNAME": "eth0"})
        commands = lambda path: rank_commands(library, size, hosts, path)  # noqa: E731
        super().__init__(commands, size, f"a rank of {library}", **environ)
        with contextlib.ExitStack() as starting:
            starting.callback(self.close)
            ranks = self.request("join")
            if sorted(ranks) != list(range(size)):
                raise WorkerError(f"{size} ranks of {library} do not know each other: {ranks}")
            self._connections = [self._connections[ranks.index(rank)] for rank in range(size)]
            starting.pop_all()

    def slowest(self, do: str, **arguments: Any) -> dict[str, float]:
        """The largest number of each kind that the ranks answer."""
        answers = self.request(do, **arguments)
        numbers = [key for key, value in answers[0].items() if isinstance(value, int | float)]
        return {key: max(answer[key] for answer in answers) for key in numbers}

    def finish(self, name: str, reduced: bool) -> None:
        """Checks that ranks have the same parameters if gradients were reduced, and drops the implementation."""
        same = len(set(self.request("digest", name=name))) == 1
        if same != (reduced or self.size == 1):  # ranks have different samples
            raise WorkerError(f"{self.library}, {name}: gradients were {'not ' if reduced else ''}reduced")
        self.request("drop", name=name)


def rank_commands(library: str, size: int, hosts: list[str] | None, path: str) -> list[list[str]]:
    """What starts the ranks: one command for a job, or one for each rank."""
    rank = ["-m", "benchmarks.training_worker", library, path]
    if library == "torch":
        prefixes = [[str(two_hosts.SCRIPT), host] for host in hosts] if hosts else [[]] * size
        return [[*prefix, sys.executable, *rank, str(number), str(size)] for number, prefix in enumerate(prefixes)]
    if hosts is not None:
        return [[*two_hosts.start(hosts), *rank, "-1", str(size)]]
    launch = ["-m", "launcher", "-n", str(size)] if size > 1 else []
    return [[sys.executable, *launch, *rank, "-1", str(size)]]


def libraries(alone: bool = False) -> list[str]:
    """Ours, and PyTorch if it is installed and wanted."""
    return ["ddp", "torch"] if not alone and harness.has_torch() else ["ddp"]
