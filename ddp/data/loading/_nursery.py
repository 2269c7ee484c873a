"""Where worker processes come from: the fork server's side in the training process.

One server serves all loaders of the process, for as long as that lives. It is started when the first loader with
workers is made, and so has imported all it needs by the time they are wanted.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterable
from typing import Any

from collectives._apart import passed_on
from collectives.start import joined
from collectives.world import promised
from ddp.data.loading._requests import CONTROL, SERVER, Ask, End, Prepare, Start
from ddp.data.loading._script import Script
from ddp.errors import WorkerError

# What would make a worker take part in the job as a rank, or begin MPI as soon as a script that it imports names it.
_OF_A_RANK = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_FD", "PMI_PORT", "SLURM_STEP_NUM_TASKS")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_ANSWER = 10.0  # s within which the server says what became of a worker


class Nursery:
    """A fork server. Raises: WorkerError if it cannot be started."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._crews = 0
        self._prepared: set[Any] = set()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a request is one packet
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PMIX_")}
        for name in _OF_A_RANK:
            environ.pop(name, None)
        environ.update(dict.fromkeys(_ONE_THREAD, "1"), MPI4PY_RC_INITIALIZE="0")
        environ.update(passed_on(joined(), promised()))
        code = f"import sys; sys.path[:] = {sys.path}; from {SERVER} import main; main({self.owner})"
        flags = [f"-{'O' * sys.flags.optimize}"] if sys.flags.optimize else []
        flags += [f"-W{option}" for option in sys.warnoptions] + [f"-X{name}" for name in _passed_on()]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), CONTROL),
        ]
        try:
            self.pid = os.posix_spawn(
                sys.executable, [sys.executable, *flags, "-c", code], environ, file_actions=actions
            )
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes cannot be started: {error}") from error
        theirs.close()
        self._control = ours
        atexit.register(self.close)

    def prepare(self, script: Script | None, modules: Iterable[str]) -> None:
        """Has the server import, while this process goes on, what workers will need."""
        wanted = {script, *modules} - self._prepared - {None}
        if wanted:
            self._prepared |= wanted
            self._tell(Prepare(script if script in wanted else None, [each for each in modules if each in wanted]))

    def start(self, count: int, script: Script | None) -> tuple[int, list[socket.socket]]:
        """The number of a new crew of `count` workers, and this end of a line to each."""
        pairs = [socket.socketpair() for _ in range(count)]
        with self._lock:
            self._crews += 1
            crew = self._crews
        try:
            # The script is named again: workers must know whether they need it.
            request = Start(crew, Prepare(script, []), list(sys.argv), _folder())
            self._tell(request, [theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        return crew, [ours for ours, _ in pairs]

    def end(self, crew: int) -> None:
        """The crew's lines have been closed, and whoever of it does not end by that is killed."""
        try:
            self._tell(End(crew))
        except WorkerError:
            pass  # the server has gone, and its workers with it

    def fate(self, crew: int, worker: int) -> tuple[int, int | None]:
        """The pid and wait status of a worker whose line has closed; (0, None) if nobody knows any more."""
        with self._lock:
            try:
                self._control.settimeout(_ANSWER)
                self._control.send(pickle.dumps(Ask(crew, worker)))
                payload = self._control.recv(4096)
                return pickle.loads(payload) if payload else (0, None)
            except OSError:
                return 0, None

    def lives(self) -> bool:
        """Whether the server has not ended."""
        try:
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    def forked(self) -> bool:
        """Whether this process is a fork of the one that the server serves."""
        return os.getpid() != self.owner

    def close(self) -> None:
        """Ends the server, and its workers."""
        atexit.unregister(self.close)
        self._control.close()

    def _tell(self, request: Any, fds: Iterable[int] = ()) -> None:
        with self._lock:
            try:
                socket.send_fds(self._control, [pickle.dumps(request)], list(fds))
            except OSError as error:
                raise WorkerError(f"the fork server of worker processes (pid {self.pid}) has gone: {error}") from error


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _passed_on() -> list[str]:
    """Options -X of this interpreter that another one should have, too."""
    return [name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()]


_nursery: Nursery | None = None
_starting = threading.Lock()


def nursery() -> Nursery:
    """The fork server of this process, started if there is none, or if it has died."""
    global _nursery
    with _starting:
        if _nursery is None or _nursery.forked() or not _nursery.lives():
            if _nursery is not None:
                _nursery.close()
            _nursery = Nursery()
        return _nursery
