"""The fork server: a small process with everything imported, of which workers are forked in a millisecond or two.

The training process must not be forked, as it may hold MPI, CUDA and threads; a new interpreter for each worker takes a
hundred times as long. This one has one thread, no library that minds being forked, and nothing of the training's. It
ends with the training process, however that ends, and its workers end with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import time
from typing import Any

import numpy.random  # so that no worker imports it  # noqa: F401

from ddp.data.loading import _script, _worker
from ddp.data.loading._requests import CONTROL, Ask, End, Prepare, Start
from ddp.data.loading._script import Script

_GRACE = 2.0  # s that workers have for what they are doing, once they are not wanted any more
_LAST_GRACE = 0.2  # s; the same when the training process has ended
_MOST = 253  # descriptors in one message, by the kernel
_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Serves until the training process `parent` has ended."""
    os.closerange(CONTROL + 1, 1 << 20)  # what C libraries of the parent's left open: MPI's sockets
    # Whoever stops a job signals all its processes, and means the rank, which then ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, _ignored)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may be closed
            stream.reconfigure(line_buffering=True, write_through=False)  # so that workers' lines are not mixed up
    gc.freeze()
    server = _Server(parent)
    try:
        server.serve()
    except (EOFError, OSError):
        pass  # the training process is gone: nobody wants workers any more
    server.end_all()


def _ignored(number: int, frame: Any) -> None:
    """Not SIG_IGN, which programs that a worker starts would inherit."""


class _Server:
    def __init__(self, parent: int) -> None:
        self._control = socket.socket(fileno=CONTROL)
        self._parent = parent
        self._crews: dict[int, list[int]] = {}  # pids
        self._ended: dict[int, int] = {}  # pid → wait status
        self._doomed: dict[int, float] = {}  # pid → when it is killed
        self._broken: _worker.Failure | None = None
        self._script: Script | None = None
        self._environ = dict(os.environ)  # the training process's, as it was last told
        # A pipe that SIGCHLD writes to, so that a wait for requests ends when a worker does.
        self._bell, ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _ignored)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        self._ring = ring
        try:
            self._witness = os.pidfd_open(parent)
        except (AttributeError, OSError):  # an old kernel: the control line tells, unless a forked child holds it
            self._witness = -1

    def serve(self) -> None:
        """Takes requests. Raises: EOFError when the parent has gone."""
        poll = select.poll()
        for fd in (CONTROL, self._bell, self._witness):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while os.getppid() == self._parent:
            ready = {fd for fd, _ in poll.poll(self._patience())}
            if self._bell in ready:
                os.read(self._bell, 4096)
            self._reap()
            if self._witness in ready:
                raise EOFError
            if CONTROL in ready:
                self._serve_one()

    def _patience(self) -> float | None:
        """Milliseconds until the next doomed worker is killed."""
        if not self._doomed:
            return None
        return max(0.0, 1e3 * (min(self._doomed.values()) - time.monotonic())) + 1

    def _serve_one(self) -> None:
        _, fds, _, _ = socket.recv_fds(self._control, 1, _MOST)
        if not fds:
            raise EOFError
        memory, *fds = fds
        with open(memory, "rb") as file:
            file.seek(0)  # it is as the writer has left it
            request = pickle.load(file)
        if isinstance(request, Prepare):
            self._prepare(request)
        elif isinstance(request, Start):
            self._prepare(request.prepare)
            self._start(request, fds)
        elif isinstance(request, End):
            now = time.monotonic()
            for pid in self._crews.pop(request.crew, ()):
                if self._ended.pop(pid, None) is None:
                    self._doomed[pid] = now + _GRACE
        else:
            self._control.send(pickle.dumps(self._fate(request)))

    def _prepare(self, wanted: Prepare) -> None:
        wanted.around.take(self._environ)
        self._environ = wanted.around.environ
        if wanted.script is not None and self._script is None:
            self._script = wanted.script
            try:
                _script.run(wanted.script)
            except BaseException as error:
                self._broken = _worker.failure(error)
        for name in wanted.modules:
            try:
                importlib.import_module(name)
            except BaseException:  # the worker that needs it meets the same error, and tells of it
                pass

    def _start(self, request: Start, fds: list[int]) -> None:
        pids = self._crews[request.crew] = []
        broken = self._broken if request.prepare.script is not None else None
        for k, end in enumerate(fds):
            pid = os.fork()
            if pid == 0:
                try:
                    self._be_worker(end, [each for i, each in enumerate(fds) if i != k], broken)
                finally:
                    os._exit(1)
            pids.append(pid)
        for fd in fds:
            os.close(fd)

    def _be_worker(self, end: int, others: list[int], broken: _worker.Failure | None) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != server:
            return
        for fd in (self._control.detach(), self._bell, self._ring, self._witness, *others):
            if fd >= 0:
                os.close(fd)
        with socket.socket(fileno=end) as line:
            _worker.run(line, broken)
        _worker.finish()

    def _fate(self, asked: Ask) -> tuple[int, int | None]:
        pids = self._crews.get(asked.crew, [])
        if asked.worker >= len(pids):
            return 0, None
        pid = pids[asked.worker]
        deadline = time.monotonic() + 1.0  # its line is closed, so it is ending
        while pid not in self._ended and time.monotonic() < deadline:
            self._reap()
            if pid not in self._ended:
                time.sleep(0.002)
        return pid, self._ended.get(pid)

    def _reap(self) -> None:
        now = time.monotonic()
        for pid, moment in self._doomed.items():
            if moment <= now:
                _kill(pid)
        wanted = {pid for pids in self._crews.values() for pid in pids}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._doomed.pop(pid, None)
            if pid in wanted:
                self._ended[pid] = status

    def end_all(self) -> None:
        """No worker outlives this process, though those that are about to end may do so in their own way."""
        living = {pid for pids in self._crews.values() for pid in pids} | set(self._doomed)
        deadline = time.monotonic() + _LAST_GRACE
        while time.monotonic() < deadline and living - set(self._ended):
            self._reap()
            living = {pid for pid in living if pid not in self._ended and os.path.exists(f"/proc/{pid}")}
            time.sleep(0.005)
        for pid in living - set(self._ended):
            _kill(pid)
        os._exit(0)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was faster
