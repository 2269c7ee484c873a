"""What runs in worker processes, and in the fork server before it forks them.

The server is the standard library's (`multiprocessing.forkserver`). It has one thread and nothing of the training
process, so that forking it is safe and takes a millisecond or two. It imports this module first, which prepares it:
what is imported here, workers have at once.

A worker takes tasks in order, and sends one result for each. It ends when its connection is closed, because its
consumer has died or needs it no more, or with the server that forked it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing import forkserver, popen_forkserver, spawn  # with what no worker shall import  # noqa: F401
from typing import Any, NamedTuple

import numpy.random  # so that no worker imports it  # noqa: F401

from ddp.data.fetching import (
    BatchMaker,
    FetchConfig,
    FetchResult,
    StartPass,
    WorkerInfo,
    seed_everything,
    set_worker_info,
)
from ddp.data.shared_memory import BatchWriter, PayloadLayout, load_payload
from ddp.multiprocessing.connections import SharingConnection

#: The variable that names the file of a fork server's settings: the pickled arguments of `_prepare_server`.
SETTINGS = "DDP_DATA_SERVER"

_GRACE = 0.2  # s that workers have to end in their own way when the training process has ended
_LONG = 1024  # bytes of a result; a longer one goes as a file in memory
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up once, in the server


class FetchTask(NamedTuple):
    """One batch. indices: None for the next of a stream; returned: slots of memory that may be used again."""

    seed: int
    indices: Any
    returned: list[int]


class WorkerFailure(NamedTuple):
    """An exception. kind: its class, pickled, None if it cannot be; at: the index that was read."""

    kind: bytes | None
    name: str
    text: str
    trace: str
    at: str | None


class WorkerSettings(NamedTuple):
    """What a worker starts with, besides its connection.

    id: 0 to workers - 1; payload: descriptor and layout of the pickled FetchConfig
    needs_script: the payload has objects that the user's script defines; environ: of the training process
    """

    id: int
    workers: int
    payload: Any
    layout: PayloadLayout
    needs_script: bool
    environ: dict[str, str]


importing_script = False  # the server imports the user's script now
_script_failure: WorkerFailure | None = None  # why it could not
_server_pid = 0
_settings = ""  # the file of the server's settings


# -- the server


def _prepare_server(preparation: dict[str, Any], modules: list[str], parent: int) -> None:
    """Imports what workers need. Raises nothing: a worker that needs what is missing meets the error itself.

    preparation: what `spawn.prepare` takes, with the user's script if it is needed; modules: names
    parent: the training process
    """
    global importing_script, _script_failure, _server_pid
    _server_pid = os.getpid()
    # A scheduler signals all processes of a job. It means the rank, which then ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, _ignore)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may be closed
            stream.reconfigure(line_buffering=True, write_through=False)  # so that workers' lines are not mixed up
    importing_script = True
    try:
        spawn.prepare(preparation)
    except BaseException as error:
        _script_failure = describe_failure(error)
    importing_script = False
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # the worker that needs it meets the same error, and reports it
            pass
    gc.freeze()
    atexit.register(_end_server, parent)


def _ignore(number: int, frame: Any) -> None:
    """Does nothing. A handler of SIG_IGN would be inherited by programs that a worker starts."""


def _end_server(parent: int) -> None:
    """Lets workers end by themselves for a moment; those that do not are killed with this process."""
    if os.getpid() != _server_pid:
        return
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
        except ChildProcessError:  # none is left
            break
    if os.getppid() != parent:  # it was killed, and could not remove its files
        server: Any = vars(forkserver)["_forkserver"]
        for remove, path in (
            (os.unlink, _settings),
            (os.unlink, server._forkserver_address),
            (os.rmdir, os.path.dirname(_settings)),
        ):
            with contextlib.suppress(OSError, TypeError):  # TypeError: it had no address yet
                remove(path)


# -- a worker


def run(connection: SharingConnection, settings: WorkerSettings) -> None:
    """The main function of a worker: serves tasks until the connection is closed, and ends the process."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != _server_pid:
        os._exit(1)
    # Each process that holds this descriptor keeps the server running. Only the training process should.
    server: Any = getattr(forkserver, "_forkserver", None)
    if server is not None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    os.environ.clear()
    os.environ.update(settings.environ)
    worker = _Worker(settings)
    try:
        while True:
            message = connection.recv()
            if isinstance(message, StartPass):
                worker.start_pass(message)
            else:
                data, fds = worker.fetch(message)
                if len(data) > _LONG:
                    # The consumer reads nothing while it sends a long task: each would wait for the other for ever.
                    with open(memory := os.memfd_create("ddp-result"), "wb", closefd=False) as file:
                        file.write(data)
                    data, fds = b"", [memory, *fds]
                connection.post(data, fds)
                for fd in fds:
                    os.close(fd)
    except (EOFError, OSError):
        pass  # the consumer has closed the connection, or died
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # there is no such stream, its reader has gone, or the script has closed it
    os._exit(0)  # exit handlers are the server's, and threads of the dataset need not be waited for


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._failure = _script_failure if settings.needs_script else None
        self._writer = BatchWriter()
        self._config: FetchConfig | None = None
        self._maker: BatchMaker

    def start_pass(self, start: StartPass) -> None:
        """Prepares a pass. What fails is the result of its first task."""
        if self._failure is not None:
            return
        me = self._settings
        try:
            first = self._config is None
            if self._config is None:
                self._config = load_payload(me.payload, me.layout)
                self._maker = BatchMaker(self._config, seed_everything, self._writer.empty)
            set_worker_info(WorkerInfo(me.id, me.workers, start.seed, self._config.dataset))
            seed_everything(start.seed)
            if first and self._config.initialize is not None:
                self._config.initialize(me.id)
            self._maker.start_pass(start)
        except BaseException as error:
            self._failure = describe_failure(error)

    def fetch(self, task: FetchTask) -> tuple[bytes, list[int]]:
        """The pickled FetchResult of a task, and the descriptors that it is sent with."""
        self._writer.give_back(task.returned)
        try:
            if self._failure is not None:
                return pickle.dumps(FetchResult(None, failure=self._failure), 5), []
            self._writer.begin()
            result = self._maker.make(task.seed, task.indices)
            if result.end:
                self._writer.abandon()
                return pickle.dumps(result, 5), []
            packed, fds = self._writer.pack(result.batch)
            return pickle.dumps(result._replace(batch=packed), 5), fds
        except BaseException as error:
            self._writer.abandon()
            return pickle.dumps(FetchResult(None, failure=describe_failure(error, self._maker.at)), 5), []


def describe_failure(error: BaseException, at: Any = None) -> WorkerFailure:
    """An exception as it is sent to the consumer. at: what was being read"""
    try:
        kind = pickle.dumps(type(error))
    except Exception:  # a class that was made in a function
        kind = None
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("ddp.data."):
        trace = trace.tb_next  # begins in the user's code
    shown = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the error
        text = "(its message cannot be shown)"
    if isinstance(at, list):
        few = [repr(index) for index in at[:8]]
        at = f"indices [{', '.join(few)}{', …' if len(at) > 8 else ''}]"
    elif at is not None and not isinstance(at, str):
        at = f"index {at!r}"
    return WorkerFailure(kind, type(error).__name__, text, shown, at)


if SETTINGS in os.environ:
    _settings = os.environ.pop(SETTINGS)
    try:
        with open(_settings, "rb") as _file:
            _arguments = pickle.load(_file)
    except FileNotFoundError:  # the training process has ended already, and removed its files
        os._exit(0)
    _prepare_server(*_arguments)
