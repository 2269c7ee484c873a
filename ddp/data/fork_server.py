"""Fork servers of worker processes: the standard library's, with what a rank's workers need besides.

`multiprocessing.get_context("forkserver")` would do but for four things. Its one server is shared with whatever else
the process starts so. It inherits the variables that make a process a rank of the job, and begins MPI as soon as a
module that it preloads does. It never preloads the user's script (Python 3.11), and each process that it forks imports
that again, needed or not. And what it forks outlives a server that was killed.

One server serves all loaders of the process. It is started when the first loader with workers is made, and so has
imported what they need by the time that they are wanted. It is replaced if it has ended, a loader needs other
modules, or one of them was loaded again; worker pools keep the server that forked them.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn, util
from typing import Any

from collectives.start import child_environment, joined
from collectives.world import promised
from ddp.data import worker
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


def preparation_data(script: bool) -> dict[str, Any]:
    """The standard library's data by which a child process is made like this one, with the user's script or without.

    Raises: ArgumentError if a script is wanted, and there is none.
    """
    data = spawn.get_preparation_data("worker")
    data["sys_path"] = [each for each in sys.path if isinstance(each, str)]
    found = [data[name] if script else data.pop(name) for name in _SCRIPT if name in data]
    if script and (not found or ("init_main_from_path" in data and not os.path.exists(found[0]))):
        raise ArgumentError(
            "num_workers: the dataset, collate_fn or worker_init_fn is defined in an interactive session, where no"
            " worker process finds it: move it to a module that can be imported, or take num_workers=0"
        )
    return data


class ForkServer(forkserver.ForkServer):
    """A fork server that has imported `modules`, "__main__" for the user's script. It ends when this is forgotten.

    Raises: ArgumentError if there is no script; WorkerError if the server cannot be started.
    """

    # Of the standard library's class, since Python 3.4.
    _forkserver_pid: int | None

    def __init__(self, modules: set[str]) -> None:
        super().__init__()
        self.modules, self.owner, self._settings = modules, os.getpid(), os.memfd_create("ddp-settings")
        self._loaded = _loaded_modules()
        preparation = preparation_data("__main__" in modules)
        del preparation["authkey"]
        with open(self._settings, "wb", closefd=False) as file:
            pickle.dump((preparation, sorted(modules - {"__main__"}), self.owner), file)
        self._environ = worker_environment() | {worker.SETTINGS: f"/proc/{self.owner}/fd/{self._settings}"}
        self.set_forkserver_preload(["ddp.data.worker"])
        self.ensure_running()

    @property
    def pid(self) -> int | None:
        """The server's process."""
        return self._forkserver_pid

    def fits(self, modules: set[str]) -> bool:
        """Whether new workers that need these can be forked of it: no module has been loaded again since it started."""
        same = all(self._loaded.get(name, spec) is spec for name, spec in _loaded_modules().items())
        return modules <= self.modules and same and self.owner == os.getpid() and self._lives()

    def _lives(self) -> bool:
        with contextlib.suppress(ChildProcessError):  # another part of the program has waited for it
            return self.pid is not None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def ensure_running(self) -> None:
        """Starts the server; the standard library calls this before each fork, too, when it has been."""
        if self.pid is not None:
            return
        wanted = self._environ
        changed = {name for name in os.environ.keys() | wanted.keys() if os.environ.get(name) != wanted.get(name)}
        _put_environment(changed, wanted)  # the process's own, not `os.environ`, which other threads read
        try:
            super().ensure_running()
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes cannot be started: {error}") from error
        finally:
            _put_environment(changed, os.environ)

    def __del__(self) -> None:
        # Not where the interpreter ends, which ends the server, nor in a forked child, whose server it is not.
        if not sys.is_finalizing() and os.getpid() == self.owner:
            _in_background(self._stop)  # type: ignore[attr-defined]  # private: the stubs leave it out
            os.close(self._settings)


def _loaded_modules() -> dict[str, Any]:
    """The spec of each module of this process: another one once the module is loaded again."""
    return {name: getattr(module, "__spec__", None) for name, module in list(sys.modules.items())}


def _put_environment(names: Iterable[str], values: Mapping[str, str]) -> None:
    for name in names:
        if name in values:
            os.putenv(name, values[name])
        else:
            os.unsetenv(name)


def _in_background(work: Callable[..., Any], *args: Any) -> None:
    """Runs something that waits for processes. Does nothing where the interpreter ends: the server ends with it."""

    def run() -> None:
        with contextlib.suppress(OSError):  # it has been waited for already
            work(*args)

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=run, name="ddp-data-reaper", daemon=True).start()


_server: ForkServer | None = None
_lock = threading.Lock()


def fork_server(names: Iterable[str]) -> ForkServer:
    """The fork server of this process, which has imported these modules; started anew if there is none that fits.

    Raises: WorkerError; ArgumentError where there is no script, or this is the import of one that workers need.
    """
    global _server
    if worker.importing_script:
        raise ArgumentError(
            "this script starts a DataLoader's worker processes wherever it is imported, and workers import it, because"
            ' it defines their dataset. Put what it runs below `if __name__ == "__main__":`, or the dataset into a'
            " module of its own"
        )
    wanted = set(names)
    with _lock:
        if _server is None or not _server.fits(wanted):
            _server = ForkServer(wanted if _server is None else _server.modules | wanted)
        return _server


def modules_of(*objects: Any) -> set[str]:
    """The modules that define these functions and classes, but for those that the server has in any case."""
    names = {name for each in objects if isinstance(name := getattr(each, "__module__", None), str)}
    return {name for name in names if name.partition(".")[0] not in ("builtins", "ddp")}


class WorkerProcess(popen_forkserver.Popen):
    """A worker process that serves the other end of a socket. `wait`, `kill` and `poll` are the standard library's.

    `pid` is known after `wait_for_start`, so that several are forked at once.
    """

    pid: int

    def __init__(self, server: ForkServer, args: tuple[Any, ...]) -> None:
        self._server = server
        super().__init__(context.ForkServerProcess(target=worker.run, args=args))

    def _launch(self, process_obj: Any) -> None:
        """As the standard library's, but without the script, and from a server of our own."""
        file = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation_data(script=False), file)
            reduction.dump(process_obj, file)
        finally:
            context.set_spawning_popen(None)
        try:
            self.sentinel, start = self._server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes has ended: {error}") from error
        alive = os.dup(start)  # by which the worker's `parent_process` knows that this one lives
        self.finalizer = util.Finalize(self, util.close_fds, (alive, self.sentinel))  # type: ignore[attr-defined]  # as above
        with open(start, "wb") as pipe:
            pipe.write(file.getbuffer())

    def wait_for_start(self) -> None:
        """Returns when the server has forked it. Raises: WorkerError if the server has ended."""
        try:
            self.pid = forkserver.read_signed(self.sentinel)
        except EOFError:
            raise WorkerError("the fork server of worker processes has ended") from None


def end_workers(processes: list[WorkerProcess]) -> None:
    """Kills those of the workers, whose sockets have been closed, that have not ended in time. Does not wait."""

    def reap() -> None:
        deadline = time.monotonic() + _GRACE
        for process in processes:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                process.kill()

    _in_background(reap)
