"""Reaper: the engine's parent, a fork of the launcher that outlives a `kill -9` of it and leaves no process behind.

Ranks may put their children into sessions of their own, and mpiexec, its proxies or an agent may be killed. Orphans
come to the reaper, a subreaper; when the launcher closes their socket, or dies, it ends them all.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from launcher import errors
from launcher.errors import StartError, UsageError
from launcher.linux import become_subreaper, die_with_parent, fork, reap_all, remove_stale_segments, signal_pipe, sweep

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SWEEP_LIMIT = 3.0
_CANNOT_START = 127
_LINE = 12  # bytes of a number that the reaper sends


class Reaper:
    """A running engine and the reaper above it, as the launcher sees them.

    start: `Engine.start` with its arguments
    scratch: path of a folder that it makes for the engine's files, and removes with the engine
    pid, engine: of the reaper and of the engine, which is 0 until the reaper has reported it
    status: how the engine ended (exit code, or minus the signal), None while it runs
    lost: True if the reaper itself has gone
    silent: True once the engine can print no more
    engine_output: file descriptor of what the engine itself prints

    Raises: UsageError if there is no place for that folder, or for one more process.
    """

    def __init__(self, start: Callable[[], int], scratch: str) -> None:
        self._scratch = scratch
        self._began = time.time()
        try:
            os.mkdir(scratch, 0o700)
        except OSError as error:
            where = os.path.dirname(scratch)
            raise UsageError(f"the folder for temporary files {where} cannot be used: {error.strerror}") from None
        self.status: int | None = None
        self.lost = False
        self.silent = False
        self.engine_output, words = os.pipe()
        self._socket, theirs = socket.socketpair()
        # Until it has handlers of its own, what it gets would go to the launcher's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            self.pid = fork()
        except StartError as reason:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for fd in (self._socket.detach(), theirs.detach(), self.engine_output, words):
                os.close(fd)
            _remove(scratch)
            raise UsageError(str(reason)) from None
        if self.pid == 0:
            try:
                os.setsid()
                self._socket.close()
                os.close(self.engine_output)
                _watch(start, theirs, words, scratch)
            finally:
                os._exit(_CANNOT_START)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        os.close(words)
        self.engine = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        """Reads a message of the reaper: the engine has started or ended, or the reaper has ended."""
        line = self._socket.recv(_LINE, socket.MSG_WAITALL)
        if not line:
            self.lost = True
        elif self.engine == 0:
            self.engine = int(line)
        else:
            self.status = int(line)

    def listen(self) -> bytes:
        """What the engine has printed since; `engine_output` must not block."""
        data = b""
        try:
            while more := os.read(self.engine_output, 1 << 16):
                data += more
        except BlockingIOError:
            return data
        self.silent = True
        return data

    def close(self) -> None:
        """Ends whatever still runs below the reaper, and then the reaper."""
        self._socket.close()
        try:
            os.kill(self.pid, signal.SIGCONT)  # a stopped one would never see that it is over
            _, status = os.waitpid(self.pid, 0)  # it gives up by itself after _SWEEP_LIMIT
        except (ProcessLookupError, ChildProcessError):  # this process ignores SIGCHLD: its status is unknown
            status = -1
        if status != 0:  # it was killed, and has left this to us
            _remove(self._scratch)
            remove_stale_segments(self._began)
        os.close(self.engine_output)


def _watch(start: Callable[[], int], launcher: socket.socket, words: int, scratch: str) -> NoReturn:
    """Runs the reaper until the launcher closes the socket or dies."""
    began = time.time()
    become_subreaper()
    wakeup = signal_pipe((signal.SIGCHLD,))
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)  # the launcher's handlers are not ours
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    me = os.getpid()
    try:
        engine = fork()
    except StartError as reason:
        os.write(words, f"{errors.start_error_line(reason)}\n".encode())
        engine = me
    if engine == 0:
        _become(start, me, words)
    # Open ends of these would keep the launcher waiting for more.
    os.close(words)
    _tell(launcher, engine)
    if engine == me:
        _tell(launcher, _CANNOT_START)
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        readable = [fd for fd, _ in poll.poll()]
        if wakeup in readable:
            os.read(wakeup, 512)
            status = reap_all().get(engine)
            if status is not None:
                _tell(launcher, os.waitstatus_to_exitcode(status))
        if launcher.fileno() in readable:  # it has let go, or died: it never sends anything
            sweep(_SWEEP_LIMIT, started_at=began)
            _remove(scratch)
            os._exit(0)


def _tell(launcher: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it has died, which the reaper sees next
        launcher.sendall(b"%*d" % (_LINE, number))


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass  # the reaper was faster
    except OSError:  # not empty: the engine was killed
        import shutil

        shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed bears a name that no other job will use


def _become(start: Callable[[], int], reaper: int, words: int) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(words, 1)
        os.dup2(words, 2)
        die_with_parent(reaper)
        os._exit(start())
    except StartError as reason:
        text = errors.start_error_line(reason)
    except Exception as error:
        text = f"the engine cannot be started: {error}"
    os.write(2, f"{text}\n".encode("utf-8", "surrogateescape"))
    os._exit(_CANNOT_START)
