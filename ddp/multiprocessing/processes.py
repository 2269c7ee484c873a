"""The three start methods, with our pipes and queues, and `spawn`, which runs one function in several processes.

`fork` copies locks that other threads hold and the state of MPI and CUDA, so that children may hang or crash. So the
default is `spawn`; the standard library and PyTorch take the system's default.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import context
from multiprocessing.connection import wait
from multiprocessing.process import parent_process
from types import TracebackType
from typing import Any

from ddp.errors import ArgumentError
from ddp.multiprocessing.connections import JoinableQueue, Queue, SharingConnection, SimpleQueue, make_pipe
from ddp.multiprocessing.pickling import share_small_tensors

__all__ = ["Process", "ProcessContext", "ProcessException", "ProcessExitedException", "ProcessRaisedException"]
__all__ += ["spawn", "start_processes"]

# Seconds from SIGTERM to SIGKILL.
_GRACE = 5.0
# Maximum number of reported characters of a traceback. They have to fit into the pipe, which is read after the process
# has ended.
_MAX_TRACEBACK = 32 << 10


class _SharingContext(context.BaseContext):
    """A context mixin with our pipes and queues."""

    def Pipe(self, duplex: bool = True) -> tuple[SharingConnection, SharingConnection]:
        """The ends of a new pipe. Both send and receive. With duplex=False, the first receives and the second sends."""
        return make_pipe(duplex)

    def Queue(self, maxsize: int = 0) -> Queue:
        """A queue of at most `maxsize` objects; 0: of any number."""
        return Queue(maxsize, ctx=self.get_context())

    def JoinableQueue(self, maxsize: int = 0) -> JoinableQueue:
        """A queue whose `join` waits until `task_done` was called for each object."""
        return JoinableQueue(maxsize, ctx=self.get_context())

    def SimpleQueue(self) -> SimpleQueue:
        """A pipe with a lock at each end."""
        return SimpleQueue(ctx=self.get_context())

    def get_context(self, method: str | None = None) -> Any:
        """The context of a start method: "spawn", "forkserver" or "fork"; None: this context.

        A context has the classes and functions of the standard library's contexts, such as Process, Queue and Pipe.

        Raises: ValueError for another method.
        """
        if method is not None and method not in _BY_METHOD:
            raise ValueError(f"cannot find context for {method!r}: expected one of {', '.join(_BY_METHOD)}")
        return self if method is None else _BY_METHOD[method]


class _SharingProcess:
    """A process mixin: tensors in the arguments go by handle."""

    @classmethod
    def _Popen(cls, process_obj: Any) -> Any:
        share_small_tensors((process_obj._args, process_obj._kwargs))
        popen = super()._Popen(process_obj)  # type: ignore[misc]  # of the next class in the method resolution order
        vars(popen).pop("fd_owners", None)
        return popen


class SpawnProcess(_SharingProcess, context.SpawnProcess):
    """A process that starts in a new interpreter; tensors in its arguments go by handle."""


class ForkServerProcess(_SharingProcess, context.ForkServerProcess):
    """A process forked by a server process, which has a single thread; tensors in its arguments go by handle."""


class SpawnContext(_SharingContext, context.SpawnContext):
    """Starts processes by spawn."""

    Process = SpawnProcess


class ForkServerContext(_SharingContext, context.ForkServerContext):
    """Starts processes by forkserver."""

    Process = ForkServerProcess


class ForkContext(_SharingContext, context.ForkContext):
    """Starts processes by fork."""


_BY_METHOD: dict[str, Any] = {"spawn": SpawnContext(), "forkserver": ForkServerContext(), "fork": ForkContext()}


class Process(context.Process):
    """A process that runs `target(*args, **kwargs)`, or `run` of a subclass, in the way set by `set_start_method`.

    It is like the standard library's Process, but tensors in its arguments go by handle, and are shared from then on. A
    fork is an exception: it shares only tensors that are in shared memory already.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return default.get_context().Process._Popen(process_obj)


class DefaultContext(context.DefaultContext, _SharingContext):
    """The context behind the names of this module: spawn, until `set_start_method` says otherwise.

    `set_start_method` sets the method of this module alone: the standard library's setting stays.
    """

    Process = Process  # the class above, which asks this context for the start method

    def get_context(self, method: str | None = None) -> Any:
        """The context of a start method: "spawn", "forkserver" or "fork"; None: the method in use.

        A context has the classes and functions of the standard library's contexts, such as Process, Queue and Pipe.

        Raises: ValueError for another method.
        """
        return super().get_context(method)

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Sets the start method: "spawn", the default, "forkserver" or "fork". force: replaces a method that was set.

        Raises: RuntimeError, without `force`, if a method was set or the default was used before; ValueError for
        another method.
        """
        super().set_start_method(method, force)

    def get_start_method(self, allow_none: bool = False) -> Any:
        """The start method; with `allow_none`, None if no method was set and the default was not used yet."""
        return super().get_start_method(allow_none)

    def get_all_start_methods(self) -> list[str]:
        """All start methods, the default first."""
        return list(_BY_METHOD)


default = DefaultContext(_BY_METHOD["spawn"])


class ProcessException(Exception):
    """A process that was started by `spawn` has failed. error_index: its index; pid: its process id."""

    def __init__(self, msg: str, error_index: int, pid: int) -> None:
        super().__init__(msg, error_index, pid)
        self.msg = msg
        self.error_index = error_index
        self.pid = pid

    def __str__(self) -> str:
        return self.msg


class ProcessRaisedException(ProcessException):
    """The function that `spawn` runs has raised an exception. The message contains the traceback."""


class ProcessExitedException(ProcessException):
    """A process ended without a traceback. exit_code: its status, -N for signal N; signal_name: the signal, or None."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.args = (msg, error_index, error_pid, exit_code, signal_name)  # exceptions are pickled by their args
        self.exit_code = exit_code
        self.signal_name = signal_name


class ProcessContext:
    """The processes that a call of `spawn` has started. processes: in order of their index."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._reports: list[Any] = []  # the receiving end of each process's pipe, for its traceback
        self._running: dict[Any, int] = {}  # sentinel of a process: its index

    def pids(self) -> list[int]:
        """The process ids, in order of index."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Waits for all processes, and returns whether they have ended. If one fails, ends the others and raises.

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
        """Ends the processes that still run: SIGTERM, then SIGKILL after `grace` seconds."""
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
        process = self.processes[index]
        report = self._reports[index]
        with contextlib.suppress(EOFError):  # it sent no traceback
            if report.poll():  # does not wait for the end of file: a child of the process may still hold the pipe
                message = f"\n\n-- Process {index} terminated with the following error:\n{report.recv()}"
                raise ProcessRaisedException(message, index, process.pid)
        code = process.exitcode
        name = signal.Signals(-code).name if code < 0 else None
        message = f"process {index} terminated with {f'signal {name}' if name else f'exit code {code}'}"
        raise ProcessExitedException(message, index, process.pid, code, name)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = "spawn",
) -> ProcessContext | None:
    """Runs `fn(index, *args)` in `nprocs` processes, for index from 0 on, and waits for them.

    If `fn` raises an exception, the other processes are ended, and this call raises an error. If the calling process
    ends first, the processes are killed. Tensors in `args` go by handle, so that all processes see the same memory, and
    `fn` and `args` have to be picklable. "fork" pickles nothing, and shares only tensors in shared memory.
    join=False: returns a ProcessContext at once. daemon: as for Process. start_method: None: the method in use.

    Raises: ProcessRaisedException, whose message holds the traceback of that process; ProcessExitedException for a
    process that was killed or ended with a status other than 0; ArgumentError for less than one process; ValueError for
    another start method.
    """
    if nprocs < 1:
        raise ArgumentError(f"spawn: nprocs should be at least 1, is {nprocs}")
    methods = default.get_context(start_method)
    started = ProcessContext()
    try:
        for index in range(nprocs):
            receiver, sender = methods.Pipe(duplex=False)
            process = methods.Process(target=_run, args=(fn, index, tuple(args), sender), daemon=daemon)
            process.start()
            sender.close()
            started.processes.append(process)
            started._reports.append(receiver)
            started._running[process.sentinel] = index
    except BaseException:
        started._end(_GRACE)
        raise
    if join:
        started.join()
    return None if join else started


start_processes = spawn


def _run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], report: Any) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        fn(index, *args)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # the parent got the signal, too, and reports it
    except Exception as error:
        report.send(format_error(error, error.__traceback__)[-_MAX_TRACEBACK:])
        report.close()
        raise SystemExit(1) from None


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback as text. If methods of the exception's class fail, the text ends with its class and arguments."""
    try:
        lines = traceback.format_exception(type(error), error, trace)
    except Exception:  # raised by the class, which `traceback` asks for attributes
        lines = [*traceback.format_tb(trace), BaseException.__repr__(error)]
    return "".join(lines).rstrip()


def _die_with_parent() -> None:
    """Waits for the parent process to end, then kills this one."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
