"""Reaper: a fork of the launcher that starts the engine, survives a `kill -9` of the launcher, and kills what is left.

Ranks may put their children into sessions of their own, and mpiexec, its proxies or an agent may be killed. The reaper
is a subreaper: it becomes the parent of its orphaned descendants. If an agent, a subreaper too, is nearer to an orphan,
the agent becomes the parent. When the launcher closes its socket to the reaper, or dies, the reaper kills everything
below itself.
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
from launcher.linux import (
    ENDING_SIGNALS,
    become_subreaper,
    die_with_parent,
    fork,
    reap_all,
    remove_stale_segments,
    signal_pipe,
    sweep,
)

# After this long (s) the reaper gives up killing what is left.
_SWEEP_LIMIT = 3.0
# Exit code of the engine's process, and the status that the reaper sends, if the engine cannot be started.
_CANNOT_START = 127
# Bytes of a number that the reaper sends.
_NUMBER_BYTES = 12
# Maximum number of bytes that are read at once.
_CHUNK = 1 << 16


class Reaper:
    """The reaper as the launcher sees it. Starts the reaper, which starts the engine, and follows the state of both.

    start: `Engine.start` with its arguments
    scratch: path of a folder for the engine's files; made here, and removed when the reaper ends
    pid: of the reaper; engine: pid of the engine, 0 until the reaper has reported it, `pid` if it could not be forked
    status: how the engine ended (exit code, or minus the signal), None until then
    lost: True once the reaper has died
    engine_output: file descriptor of what the engine itself prints; output_closed: True once it can print no more

    Raises: UsageError if the folder cannot be made, or the user may have no more processes.
    """

    def __init__(self, start: Callable[[], int], scratch: str) -> None:
        self._scratch = scratch
        self._started_at = time.time()
        try:
            os.mkdir(scratch, 0o700)
        except OSError as error:
            parent = os.path.dirname(scratch)
            raise UsageError(f"the folder for temporary files {parent} cannot be used: {error.strerror}") from None
        self.status: int | None = None
        self.lost = False
        self.output_closed = False
        self.engine_output, output = os.pipe()
        self._socket, reaper_socket = socket.socketpair()
        # Block these signals until the reaper has reset their handlers, which would otherwise be the launcher's.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            self.pid = fork()
        except StartError as reason:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for fd in (self._socket.detach(), reaper_socket.detach(), self.engine_output, output):
                os.close(fd)
            _remove(scratch)
            raise UsageError(str(reason)) from None
        if self.pid == 0:
            try:
                os.setsid()
                self._socket.close()
                os.close(self.engine_output)
                _run_reaper(start, reaper_socket, output, scratch)
            finally:
                os._exit(_CANNOT_START)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        reaper_socket.close()
        os.close(output)
        self.engine = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> None:
        """Receives a message from the reaper: the engine has started or ended, or the reaper has died."""
        number = self._socket.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
        if not number:
            self.lost = True
        elif self.engine == 0:
            self.engine = int(number)
        else:
            self.status = int(number)

    def read_output(self) -> bytes:
        """What the engine has printed since the last call. `engine_output` must be nonblocking."""
        data = b""
        try:
            while chunk := os.read(self.engine_output, _CHUNK):
                data += chunk
        except BlockingIOError:
            return data
        self.output_closed = True
        return data

    def end(self) -> None:
        """Makes the reaper kill everything below itself. Does not wait for it; `close` does."""
        with contextlib.suppress(OSError):  # The reaper has ended.
            self._socket.shutdown(socket.SHUT_RDWR)  # Closing is not enough: a later reaper has inherited this end.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # A stopped reaper would not notice the closed socket.

    def close(self) -> None:
        """Makes the reaper kill everything below itself, and waits for its end."""
        self.end()
        self._socket.close()
        try:
            _, status = os.waitpid(self.pid, 0)  # The reaper gives up by itself after _SWEEP_LIMIT.
        except ChildProcessError:  # This process ignores SIGCHLD, so the status is unknown.
            status = -1
        if status != 0:  # It may have been killed before it could clean up.
            _remove(self._scratch)
            remove_stale_segments(self._started_at)
        os.close(self.engine_output)


def _run_reaper(start: Callable[[], int], launcher: socket.socket, output: int, scratch: str) -> NoReturn:
    """Runs in the reaper until the launcher closes the socket or dies. output: where the engine prints"""
    started_at = time.time()
    become_subreaper()
    wakeup = signal_pipe((signal.SIGCHLD,))
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    reaper = os.getpid()
    try:
        engine = fork()
    except StartError as reason:
        os.write(output, f"{errors.start_error_line(reason)}\n".encode())
        engine = reaper
    if engine == 0:
        _run_engine(start, reaper, output)
    os.close(output)  # While a writing end is open, the launcher waits for more output.
    _send(launcher, engine)
    if engine == reaper:
        _send(launcher, _CANNOT_START)
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        readable = [fd for fd, _ in poll.poll()]
        if wakeup in readable:
            os.read(wakeup, 512)
            status = reap_all().get(engine)
            if status is not None:
                _send(launcher, os.waitstatus_to_exitcode(status))
        if launcher.fileno() in readable:  # The launcher sends nothing: it has closed the socket, or died.
            sweep(_SWEEP_LIMIT, started_at=started_at)
            _remove(scratch)
            os._exit(0)


def _send(launcher: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # The launcher has died, which the reaper notices next.
        launcher.sendall(b"%*d" % (_NUMBER_BYTES, number))


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass  # The reaper has removed it.
    except OSError:  # It is not empty, for example because the engine was killed.
        import shutil

        shutil.rmtree(folder, ignore_errors=True)  # No other job uses this name, so what cannot be removed may stay.


def _run_engine(start: Callable[[], int], reaper: int, output: int) -> NoReturn:
    """Starts the engine in this process, a child of the reaper, and exits with its code.

    If the engine cannot be started, prints the reason and exits with _CANNOT_START.
    """
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        die_with_parent(reaper)
        os._exit(start())
    except StartError as reason:
        text = errors.start_error_line(reason)
    except Exception as error:
        text = f"the engine cannot be started: {error}"
    os.write(2, f"{text}\n".encode("utf-8", "surrogateescape"))
    os._exit(_CANNOT_START)
