"""Prepares the fork server of worker processes: the server imports this module before it forks any of them.

The server is the standard library's (`multiprocessing.forkserver`). It has one thread and nothing of the training
process, so that forking it is safe and takes a millisecond or two. Whatever is imported here, workers have at once.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import shutil
import signal
import sys
import time
from multiprocessing import forkserver, popen_forkserver, spawn  # with what no worker shall import  # noqa: F401
from typing import Any

import numpy.random  # so that no worker imports it  # noqa: F401

from ddp.data import worker

#: The variable that names the file of the server's settings: JSON of {"argv": sys.argv, "path": sys.path, "main": the
#: user's script as `spawn.prepare` takes it, "modules": [names], "parent": pid of the training process}.
SETTINGS = "DDP_DATA_PRELOAD"

_GRACE = 0.2  # s that workers have to end in their own way when the training process has ended
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up once, in the server

importing_script = False
_environ: dict[str, str] = {}  # the server's, when it was started
_server_pid = 0


def prepare_server(settings: dict[str, Any]) -> None:
    """Imports what workers need. Raises nothing: a worker that needs what is missing meets the error itself."""
    global importing_script, _server_pid
    _server_pid = os.getpid()
    _environ.update(os.environ)
    # A scheduler signals all processes of a job. It means the rank, which then ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, _ignore)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may be closed
            stream.reconfigure(line_buffering=True, write_through=False)  # so that workers' lines are not mixed up
    sys.argv[:], sys.path[:] = settings["argv"], settings["path"]
    if settings["main"]:
        importing_script = True
        try:
            spawn.prepare(settings["main"])
        except BaseException as error:
            worker.script_failure = worker.describe_failure(error)
        importing_script = False
    for name in settings["modules"]:
        try:
            importlib.import_module(name)
        except BaseException:  # the worker that needs it meets the same error, and reports it
            pass
    gc.freeze()
    atexit.register(_end_server, settings["parent"])


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
    address = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_address", None)
    if os.getppid() != parent and isinstance(address, str):  # it was killed, and could not remove its socket
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)


def run_worker(connection: Any, needs_script: bool, environ: dict[str, str]) -> None:
    """The main function of a worker, which is tied to the server's life, and gets the training process's environment.

    What modules in the server have added to the environment stays.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != _server_pid:
        os._exit(1)
    # Each process that holds this descriptor keeps the server running. Only the training process should.
    server: Any = getattr(forkserver, "_forkserver", None)
    if server is not None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    for name in _environ.keys() - environ.keys():
        os.environ.pop(name, None)
    for name, value in environ.items():
        if _environ.get(name) != value:
            os.environ[name] = value
    worker.run(connection, needs_script)


if SETTINGS in os.environ:
    try:
        with open(os.environ.pop(SETTINGS), "rb") as _file:
            _settings = json.load(_file)
    except OSError:  # another server has taken the place of this one already
        os._exit(0)
    prepare_server(_settings)
