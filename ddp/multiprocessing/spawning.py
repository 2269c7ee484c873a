"""`spawn`: n processes run one function, and an exception in one of them is raised here, with its traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import parent_process
from typing import Any

from ddp.errors import ArgumentError
from ddp.multiprocessing.contexts import default

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_MOST = 32 << 10  # characters of a traceback: what the pipe takes at once, since it is read when the process has ended


class ProcessException(Exception):
    """A process that was started by `spawn` has failed. error_index: which of them; pid: its number."""

    def __init__(self, msg: str, error_index: int, pid: int) -> None:
        super().__init__(msg, error_index, pid)
        self.msg, self.error_index, self.pid = msg, error_index, pid

    def __str__(self) -> str:
        return self.msg


class ProcessRaisedException(ProcessException):
    """The function has raised an exception: its traceback is the message."""


class ProcessExitedException(ProcessException):
    """A process ended otherwise. exit_code: its status, -N for signal N; signal_name: of that signal, or None."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.args = (msg, error_index, error_pid, exit_code, signal_name)  # from which it is pickled
        self.exit_code, self.signal_name = exit_code, signal_name


class ProcessContext:
    """The processes of a `spawn`. processes: in order of their index."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._reports: list[Any] = []  # the receiving ends
        self._running: dict[Any, int] = {}  # index by sentinel

    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Waits until all have ended; returns whether they have. When one fails, ends the others and raises.

        timeout: seconds to wait at most. grace_period: seconds that the others have after SIGTERM before they are
        killed; None: 5. Raises: ProcessRaisedException, ProcessExitedException.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self._running:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ended = wait(list(self._running), left)
                if not ended:
                    return False
                for sentinel in ended:
                    index = self._running.pop(sentinel)
                    self.processes[index].join()
                    if self.processes[index].exitcode:
                        self._raise(index)
        except BaseException:
            self._end(_GRACE if grace_period is None else grace_period)
            raise
        return True

    def _end(self, grace: float) -> None:
        """Ends what still runs."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + grace
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._running.clear()

    def _raise(self, index: int) -> None:
        process, report = self.processes[index], self._reports[index]
        with contextlib.suppress(EOFError):  # it has sent none
            if report.poll():  # a child of its own may have the other end still
                message = f"\n\n-- Process {index} terminated with the following error:\n{report.recv()}"
                raise ProcessRaisedException(message, index, process.pid)
        code, name = process.exitcode, None
        if code < 0:
            name = signal.Signals(-code).name
        message = f"process {index} terminated with {f'signal {name}' if name else f'exit code {code}'}"
        raise ProcessExitedException(message, index, process.pid, code, name)


def start_processes(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = "spawn",
) -> ProcessContext | None:
    """Runs `fn(index, *args)` in `nprocs` processes, index from 0 on. They end when this process does.

    join: waits for them, and returns None; else returns a ProcessContext. daemon: as of Process. start_method: None is
    the one set. Raises: what ProcessContext.join raises; ArgumentError for less than one process.
    """
    if nprocs < 1:
        raise ArgumentError(f"spawn: nprocs should be at least 1, is {nprocs}")
    made = default.get_context(start_method)
    started = ProcessContext()
    try:
        for index in range(nprocs):
            ours, theirs = made.Pipe(duplex=False)
            process = made.Process(target=_run, args=(fn, index, tuple(args), theirs), daemon=daemon)
            process.start()
            theirs.close()
            started.processes.append(process)
            started._reports.append(ours)
            started._running[process.sentinel] = index
    except BaseException:
        started._end(_GRACE)
        raise
    if not join:
        return started
    started.join()
    return None


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Runs `fn(index, *args)` in `nprocs` processes, index from 0 on, and waits for them.

    An exception in one ends the others and is raised here. join off: returns a ProcessContext at once. Tensors in
    `args` go by handle, so all processes see the same memory. `fn` and what it is given have to be picklable.
    Raises: ProcessRaisedException, whose message holds the traceback there; ProcessExitedException for one that was
    killed or left with another status than 0.
    """
    return start_processes(fn, args, nprocs, join, daemon, start_method)


def _run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], report: Any) -> None:
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_die_with_parent, args=(parent.sentinel,), daemon=True).start()
    try:
        fn(index, *args)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # the parent has got it too, and tells of it
    except Exception:
        report.send(traceback.format_exc()[-_MOST:])
        report.close()
        raise SystemExit(1) from None


def _die_with_parent(sentinel: int) -> None:
    """Ends this process when its parent has ended, whatever it is doing then."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
