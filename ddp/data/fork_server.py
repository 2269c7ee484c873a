"""Fork servers of worker processes: the standard library's, started without what would make a worker act as a rank.

One server serves all loaders of the process. It is started when the first loader with workers is made, and so has
imported what they need (`ddp.data.preload`) by the time that they are wanted. It is replaced if it has ended, if a
loader needs other modules, or if a module was loaded again; worker pools keep the server that forked them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn, util
from types import ModuleType
from typing import Any

from collectives.start import child_environment, joined
from collectives.world import promised
from ddp.data import preload
from ddp.errors import ArgumentError, WorkerError

_GRACE = 2.0  # s that workers have for what they are doing when their pool is closed

# What would make a worker take part in the job as a rank, or begin MPI as soon as a script that it imports names it.
_OF_A_RANK = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_FD", "PMI_PORT", "SLURM_STEP_NUM_TASKS")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SCRIPT = ("init_main_from_name", "init_main_from_path")


def worker_environment() -> dict[str, str]:
    """The environment of this process as its workers should have it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PMIX_")}
    for name in _OF_A_RANK:
        environ.pop(name, None)
    environ.update(dict.fromkeys(_ONE_THREAD, "1"), MPI4PY_RC_INITIALIZE="0")
    environ.update(child_environment(joined(), promised()))
    return environ


def current_script() -> dict[str, str]:
    """The script of this process, as `spawn.prepare` takes it. Raises: ArgumentError if it has none."""
    data = spawn.get_preparation_data("worker")
    script = {name: str(data[name]) for name in _SCRIPT if name in data}
    path = script.get("init_main_from_path")
    if not script or (path is not None and not os.path.exists(path)):
        raise ArgumentError(
            "num_workers: the dataset, collate_fn or worker_init_fn is defined in an interactive session, where no"
            " worker process finds it: move it to a module that can be imported, or take num_workers=0"
        )
    return script


def refuse_while_imported() -> None:
    """Raises: ArgumentError in a script that the server imports and that is about to start workers of its own."""
    if preload.importing_script:
        raise ArgumentError(
            "this script starts a DataLoader's worker processes wherever it is imported, and workers import it, because"
            ' it defines their dataset. Put what it runs below `if __name__ == "__main__":`, or the dataset into a'
            " module of its own"
        )


def loaded_modules() -> dict[str, object]:
    """The spec of each module of this process, of which `importlib.reload` makes a new one."""
    modules = list(sys.modules.items())
    # Something else than a module may run code when it is asked.
    return {name: vars(module).get("__spec__") for name, module in modules if issubclass(type(module), ModuleType)}


class ForkServer:
    """A fork server that has imported `modules` and the user's script, {} for none. It ends when this is forgotten.

    Raises: WorkerError if it cannot be started.
    """

    def __init__(self, modules: frozenset[str], script: dict[str, str]) -> None:
        self.owner = os.getpid()
        self.modules, self.script, self._loaded = modules, script, loaded_modules()
        path = [each for each in sys.path if isinstance(each, str)]
        settings = {"argv": sys.argv, "path": path, "main": script, "modules": sorted(modules), "parent": self.owner}
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload(["ddp.data.preload"])
        self._settings = os.memfd_create("ddp-preload")  # a variable of the environment holds 128 KiB at most
        with open(self._settings, "wb", closefd=False) as file:
            file.write(json.dumps(settings).encode())
        wanted = worker_environment() | {preload.SETTINGS: f"/proc/{self.owner}/fd/{self._settings}"}
        changed = {name for name in os.environ.keys() | wanted.keys() if os.environ.get(name) != wanted.get(name)}
        _put_environment(changed, wanted)  # the process's own, not `os.environ`, which other threads read
        try:
            self._server.ensure_running()
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes cannot be started: {error}") from error
        finally:
            _put_environment(changed, os.environ)
        # It would be started again, with the environment of a rank: `fits` says that it has ended.
        vars(self._server)["ensure_running"] = lambda: None
        weakref.finalize(self, _stop, self._server, self._settings, self.owner).atexit = False

    @property
    def pid(self) -> int:
        """The server's process."""
        pid: int = self._server._forkserver_pid
        return pid

    def fits(self, modules: frozenset[str], script: dict[str, str]) -> bool:
        """Whether new workers that need these can be forked of it."""
        if self.owner != os.getpid() or not modules <= self.modules or (script and script != self.script):
            return False
        # A module that was loaded again may be one that the dataset's own module uses: the server has its old code.
        now = loaded_modules()
        if any(now.get(name, spec) is not spec for name, spec in self._loaded.items()):
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def connect(self, fds: list[int]) -> tuple[int, int]:
        """Forks a worker that inherits `fds`: where its pid and exit code are read, and where its start is written."""
        try:
            ends: tuple[int, int] = self._server.connect_to_new_process(fds)
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes has ended: {error}") from error
        return ends


def _put_environment(names: Iterable[str], values: Mapping[str, str]) -> None:
    for name in names:
        if name in values:
            os.putenv(name, values[name])
        else:
            os.unsetenv(name)


def _stop(server: Any, settings: int, owner: int) -> None:
    os.close(settings)
    if os.getpid() == owner:  # else this is a forked child, whose server it is not
        _in_background(server._stop)


def _in_background(work: Any, *args: Any) -> None:
    """Runs something that waits for processes. Does nothing where the interpreter ends: the server ends with it."""

    def run() -> None:
        with contextlib.suppress(OSError):  # it has been waited for already
            work(*args)

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=run, name="ddp-data-reaper", daemon=True).start()


_server: ForkServer | None = None
_lock = threading.Lock()


def fork_server(modules: Iterable[str], script: dict[str, str]) -> ForkServer:
    """The fork server of this process, started anew if there is none that fits. Raises: WorkerError."""
    global _server
    wanted = frozenset(modules)
    with _lock:
        if _server is None or not _server.fits(wanted, script):
            if _server is not None:
                wanted, script = wanted | _server.modules, script or _server.script
            _server = ForkServer(wanted, script)
        return _server


class WorkerProcess(popen_forkserver.Popen):
    """A worker process that serves the other end of a socket. `wait`, `kill` and `poll` are the standard library's.

    `pid` is known after `wait_for_start`, so that several are forked at once.
    """

    pid: int

    def __init__(self, server: ForkServer, *args: Any) -> None:
        self._server = server
        super().__init__(context.ForkServerProcess(target=preload.run_worker, args=args))

    def _launch(self, process_obj: Any) -> None:
        data = spawn.get_preparation_data(process_obj.name)
        for name in _SCRIPT:
            data.pop(name, None)  # the server has it if it is needed
        file = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(data, file)
            reduction.dump(process_obj, file)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, start = self._server.connect(self._fds)  # type: ignore[attr-defined]  # of the base class
        alive = os.dup(start)  # by which the worker's `parent_process` knows that this one lives
        self.finalizer = util.Finalize(self, _close, (alive, self.sentinel))
        with open(start, "wb") as pipe:
            pipe.write(file.getbuffer())

    def wait_for_start(self) -> None:
        """Returns when the server has forked it. Raises: WorkerError if the server has ended."""
        try:
            self.pid = forkserver.read_signed(self.sentinel)
        except EOFError:
            raise WorkerError("the fork server of worker processes has ended") from None


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def end_workers(processes: list[WorkerProcess]) -> None:
    """Kills those of the workers, whose sockets have been closed, that have not ended in time. Does not wait."""
    _in_background(_reap, processes)


def _reap(processes: list[WorkerProcess]) -> None:
    deadline = time.monotonic() + _GRACE
    for process in processes:
        if process.wait(max(0.0, deadline - time.monotonic())) is None:
            process.kill()
