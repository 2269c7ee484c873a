"""The code of worker processes, and of the fork server that forks them.

The server has one thread and holds no data of the training process. So forking it is safe, and takes a millisecond or
two. Workers inherit the modules that the server has imported. A request to the server holds the file descriptors of one
worker, which starts like a process of the standard library's `multiprocessing.forkserver`.

A worker takes tasks in order, and sends one result for each. It ends when its connection is closed, because its
consumer has died or no longer needs it, or when the server that forked it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import reprlib
import signal
import sys
import time
from multiprocessing import forkserver, spawn, util
from multiprocessing import popen_forkserver as _popen_forkserver  # imported once, in the server  # noqa: F401
from typing import Any, NamedTuple, NoReturn

import numpy.random  # imported once, in the server  # noqa: F401

from ddp.data.fetching import (
    BatchMaker,
    FetchConfig,
    FetchResult,
    StartPass,
    WorkerFailure,
    WorkerInfo,
    seed_everything,
    set_worker_info,
)
from ddp.data.shared_memory import BatchWriter, load_payload
from ddp.errors import ArgumentError
from ddp.multiprocessing.connections import SharingConnection
from ddp.multiprocessing.processes import format_error

_GRACE = 0.2  # time (s) for workers to end by themselves after the training process has ended
_LONG = 1024  # bytes; a longer result is sent as a file in memory
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up once, in the server


class FetchTask(NamedTuple):
    """A request for batch `number`.

    indices: the indices of the samples; None: the next batch of a stream
    returned: numbers of the shared memory blocks that the consumer no longer uses
    """

    number: int
    seed: int
    indices: Any
    returned: list[int]


importing_script = False  # whether the server is importing the user's script
_script_failure: ArgumentError | None = None  # why that import failed
_server_pid = 0


# -- the server


def _prepare_server(preparation: dict[str, Any], modules: list[str]) -> None:
    """Imports what workers need. Import errors are not raised here: a worker that needs the module meets them again.

    preparation: the argument of `spawn.prepare`, with the user's script if workers need it
    modules: names of other modules
    """
    global importing_script, _script_failure, _server_pid
    _server_pid = os.getpid()
    # A scheduler signals all processes of a job, but only the rank should react: it ends its workers. These handlers do
    # nothing. SIG_IGN would do, too, but programs that a worker starts would inherit it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(line_buffering=True, write_through=False)  # so that workers' lines are not mixed up
    importing_script = True
    try:
        spawn.prepare(preparation)
    except BaseException as error:
        _script_failure = ArgumentError(
            f"workers import this script, because it defines their dataset, and that raised {type(error).__name__}. Put"
            ' what it runs below `if __name__ == "__main__":`, or the dataset into a module of its own'
        )
        _script_failure.__cause__ = error
    importing_script = False
    for name in modules:
        with contextlib.suppress(BaseException):  # the worker that needs it meets the same error, and reports it
            importlib.import_module(name)
    gc.freeze()


def serve(requests_fd: int) -> None:
    """The main function of the server: forks a worker for each request until the training process closes its end.

    requests_fd: the server's end of a connection; the first message is the arguments of `_prepare_server`
    """
    requests = SharingConnection(requests_fd)
    _prepare_server(*requests.recv())
    statuses: dict[int, int] = {}  # by pid: the socket for the exit code
    signal.signal(signal.SIGCHLD, lambda number, frame: _report_exits(statuses))
    while True:
        try:
            status, *fds = requests.take().fd_owners
        except (EOFError, OSError):  # the training process has closed its end, or has ended
            break
        pid = os.fork()
        if pid == 0:
            _become_worker(status, fds, [requests_fd, *statuses.values()])
        _write_number(status, pid)
        statuses[pid] = status
        _report_exits(statuses)  # if the worker ended before the line above, its signal came too early
        for fd in fds:
            os.close(fd)
    deadline = time.monotonic() + _GRACE
    # Workers end by themselves as their connections close; those that do not are killed with this process.
    while statuses and time.monotonic() < deadline:
        time.sleep(0.002)


def _report_exits(statuses: dict[int, int]) -> None:
    """Writes the exit codes of ended workers to their sockets.

    A signal handler calls it, so a call may be interrupted by another one.
    """
    for pid in list(statuses):
        with contextlib.suppress(ChildProcessError):  # an interrupting call has reaped this process
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = statuses.pop(pid)
                _write_number(status, os.waitstatus_to_exitcode(code))
                os.close(status)


def _write_number(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the consumer has gone
        forkserver.write_signed(status, number)


def _become_worker(start: int, fds: list[int], unused: list[int]) -> NoReturn:
    """Called in the forked process: reads a process object from the descriptor `start`, runs it, and exits.

    fds: the descriptor of the resource tracker, then the descriptors that the process object uses
    unused: descriptors of the server, which are closed
    """
    code = 1
    try:
        serve_one: Any = vars(forkserver)["_serve_one"]  # -1 below: no descriptor of a standard library server
        code = serve_one(start, [-1, *fds], unused, {signal.SIGCHLD: signal.SIG_DFL})
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


# -- a worker


def run(
    connection: SharingConnection, id: int, workers: int, payload: Any, needs_script: bool, environ: dict[str, str]
) -> None:
    """The main function of a worker: serves tasks until the connection is closed, and ends the process.

    id: 0 to workers - 1; payload: descriptor and layout of the pickled FetchConfig
    needs_script: whether the payload has objects that the user's script defines; environ: replaces the environment
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != _server_pid:
        os._exit(1)
    os.environ.clear()
    os.environ.update(environ)
    worker = _Worker(id, workers, payload, _script_failure if needs_script else None)
    with contextlib.suppress(EOFError, OSError):  # the consumer has closed the connection, or died
        while True:
            message = connection.recv()
            if isinstance(message, StartPass):
                worker.start_pass(message)
                continue
            data, fds = worker.fetch(message)
            if len(data) > _LONG:
                # Not through the socket: the consumer does not read while it sends a long task, so both sides would
                # block for ever.
                with open(memory := os.memfd_create("ddp-result"), "wb", closefd=False) as file:
                    file.write(data)
                data = b""
                fds = [memory, *fds]
            connection.post(data, fds)
            for fd in fds:
                os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the stream is None or closed
            stream.flush()
    # Unlinks semaphores of the dataset, for example of `tqdm`. Otherwise the resource tracker would warn of them.
    util._run_finalizers(0)  # type: ignore[attr-defined]  # private
    os._exit(0)  # without the exit handlers, which are the server's, and without waiting for threads of the dataset


class _Worker:
    def __init__(self, id: int, workers: int, payload: Any, failure: BaseException | None) -> None:
        self._id = id
        self._workers = workers
        self._payload = payload
        self._failure = failure
        self._writer = BatchWriter()
        self._maker: BatchMaker | None = None

    def start_pass(self, start: StartPass) -> None:
        """Prepares a pass. If that fails, the error is the result of every later task."""
        try:
            if self._failure is not None:
                return
            first = self._maker is None
            if self._maker is None:
                self._config: FetchConfig = load_payload(*self._payload)
                self._maker = BatchMaker(self._config, seed_everything, self._writer.empty)
            set_worker_info(WorkerInfo(self._id, self._workers, start.seed, self._config.dataset))
            seed_everything(start.seed)
            if first and self._config.initialize is not None:
                self._config.initialize(self._id)
            self._maker.start_pass(start)
        except BaseException as error:
            self._failure = error

    def fetch(self, task: FetchTask) -> tuple[bytes, list[int]]:
        """Makes a batch. Returns the pickled FetchResult, and the descriptors to send with it."""
        self._writer.begin(task.returned)
        try:
            if self._failure is not None:
                raise self._failure
            assert self._maker is not None
            result = self._maker.make(task.seed, task.indices)
            packed, fds = (None, []) if result.end else self._writer.pack(result.batch)
            return pickle.dumps(result._replace(batch=packed), 5), fds
        except BaseException as error:
            return pickle.dumps(FetchResult(None, failure=self._described(error, task.number)), 5), []

    def _described(self, error: BaseException, number: int) -> WorkerFailure:
        """Describes an exception in batch `number` for the consumer."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("ddp.data."):
            trace = trace.tb_next  # skips our frames: the user's code comes after them
        shown = format_error(error, trace or error.__traceback__)
        try:
            text = str(error)
        except Exception:  # a broken __str__ must not hide the error
            text = "(its message cannot be shown)"
        origin = f"DataLoader worker {self._id} of {self._workers}, batch {number}"
        position = None if self._maker is None else self._maker.position
        if isinstance(position, list):
            origin += f", indices {reprlib.repr(position)}"
        elif isinstance(position, str):
            origin += f", {position}"
        elif position is not None:
            origin += f", index {position!r}"
        message = f"{type(error).__name__} in {origin}: {text}\n\nIn the worker:\n{shown}"
        pickled_class = b""
        with contextlib.suppress(Exception):  # for example a class that is defined in a function
            pickled_class = pickle.dumps(type(error))
        return WorkerFailure(message, pickled_class, _pickled_attributes(error))


# Attributes that Python's own exceptions do not have in their `__dict__`. Left out: `args`, which becomes the message,
# and the `obj` of an AttributeError, which may be the whole dataset.
_FIELDS = (
    "errno",
    "strerror",
    "filename",
    "filename2",
    "name",
    "path",
    "lineno",
    "offset",
    "text",
    "encoding",
    "object",
    "start",
    "end",
    "reason",
)


def _pickled_attributes(error: BaseException) -> dict[str, bytes]:
    """Returns the pickled attributes of an exception, by name. Leaves out attributes that cannot be pickled."""
    pickled = {}
    for name in (*_FIELDS, *object.__getattribute__(error, "__dict__")):
        with contextlib.suppress(Exception):
            pickled[name] = pickle.dumps(object.__getattribute__(error, name), 5)
    return pickled
