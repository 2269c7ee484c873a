"""Where worker processes come from: the fork server's side in the training process.

One server serves all loaders of the process. It is started when the first loader with workers is made, and so has
imported all it needs by the time they are wanted. It lives as long as the process, unless a module is loaded again: the
server has the old one, so it is left to the workers that came from it, and another one is started.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from ddp.data.loading._modules import Modules
from ddp.data.loading._requests import CONTROL, SERVER, Ask, End, Prepare, Start
from ddp.data.loading._script import Script
from ddp.data.loading._surroundings import Surroundings, environment
from ddp.errors import WorkerError

_ANSWER = 10.0  # s within which the server says what became of a worker


class Nursery:
    """A fork server. It ends when this is closed, or forgotten. Raises: WorkerError if it cannot be started."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.RLock()  # a crew may be forgotten, and end, while this thread holds it
        self._crews = 0
        self._modules = Modules()
        self._script: Script | None = None
        self._prepared: set[str] = set()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a request is one packet
        code = f"import sys; sys.path[:] = {sys.path}; from {SERVER} import main; main({self.owner})"
        flags = [f"-{'O' * sys.flags.optimize}"] if sys.flags.optimize else []
        flags += [f"-W{option}" for option in sys.warnoptions] + [f"-X{name}" for name in _passed_on()]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), CONTROL),
        ]
        _reap()
        try:
            self.pid = os.posix_spawn(
                sys.executable, [sys.executable, *flags, "-c", code], environment(), file_actions=actions
            )
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes cannot be started: {error}") from error
        theirs.close()
        self._control = ours
        self._child = _Child(self.pid)
        self._end = weakref.finalize(self, _end, ours, self._child)

    def prepare(self, script: Script | None, modules: Iterable[str]) -> None:
        """Has the server import, while this process goes on, what workers will need."""
        with self._lock:
            new = script if self._script is None else None
            wanted = [each for each in modules if each not in self._prepared]
            if new is not None or wanted:
                self._script = self._script or new
                self._prepared.update(wanted)
                self._tell(Prepare(new, wanted, Surroundings.current()))

    def start(self, count: int, script: Script | None) -> tuple[int, list[socket.socket]]:
        """The number of a new crew of `count` workers, and this end of a line to each."""
        pairs = [socket.socketpair() for _ in range(count)]
        with self._lock:
            self._crews += 1
            crew = self._crews
        try:
            # The script is named again: workers must know whether they need it.
            request = Start(crew, Prepare(script, [], Surroundings.current()))
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
                self._tell(Ask(crew, worker))
                payload = self._control.recv(4096)
                return pickle.loads(payload) if payload else (0, None)
            except (OSError, WorkerError):
                return 0, None

    def fits(self) -> bool:
        """Whether new workers can be forked of it: it has not ended, and has the modules that this process has."""
        return not self.forked() and not self._child.ended() and not self._modules.reloaded()

    def forked(self) -> bool:
        """Whether this process is a fork of the one that the server serves."""
        return os.getpid() != self.owner

    def successor(self) -> Nursery:
        """A new one, told to import what this one was."""
        new = Nursery()
        new.prepare(self._script, sorted(self._prepared))
        return new

    def close(self) -> None:
        """Ends the server, and its workers."""
        self._end()

    def _tell(self, request: Any, fds: Iterable[int] = ()) -> None:
        """Sends a request: in memory whose descriptor goes along, as a long command line is too much for a packet."""
        with self._lock:
            try:
                with open(os.memfd_create("ddp-request"), "wb") as file:
                    pickle.dump(request, file, 5)
                    file.flush()
                    socket.send_fds(self._control, [b"."], [file.fileno(), *fds])
            except OSError as error:
                raise WorkerError(
                    f"the fork server of worker processes (pid {self.pid}) has gone, or cannot be told: {error}"
                ) from error


def _passed_on() -> list[str]:
    """Options -X of this interpreter that another one should have, too."""
    return [name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()]


class _Child:
    """A process that this one has started, and has to wait for when it has ended: it is a zombie until then."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = False

    def ended(self) -> bool:
        """Whether it has; the pid may be another's from then on."""
        if not self._ended:
            try:
                self._ended = os.waitpid(self._pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:  # somebody else has waited for it
                self._ended = True
        return self._ended


_ending: set[_Child] = set()


def _end(control: socket.socket, child: _Child) -> None:
    control.close()
    _ending.add(child)
    _reap()


def _reap() -> None:
    """A server takes a moment to end, and nobody waits that long: this is called when one comes, goes or is used."""
    for child in list(_ending):
        if child.ended():
            _ending.discard(child)


_nursery: Nursery | None = None
_starting = threading.Lock()


def nursery() -> Nursery:
    """The fork server of this process, started if there is none, or if new workers cannot come from it."""
    global _nursery
    with _starting:
        _reap()
        if _nursery is None:
            _nursery = Nursery()
        elif not _nursery.fits():
            _nursery = _nursery.successor()  # crews that came from the old one keep it alive
        return _nursery
