"""A fork server of worker processes: like the standard library's, but made for the workers of a rank.

The server of `multiprocessing.get_context("forkserver")` has five faults here. A process has only one such server, for
everything that it starts in that way. The server inherits the variables that make a process a rank of the job, so MPI
starts in it if it preloads a module that uses MPI. In Python 3.11 the server never preloads the user's script.
Instead, each process that it forks imports the script again, needed or not. These processes live on if the server is
killed. And the server listens at a path in TMPDIR: a killed job leaves the folder behind, and a path of more than 107
bytes cannot be bound.

One server serves all loaders of the process. It is started when the first loader with workers is made, so that it can
import the modules of the workers before they are wanted. When a loader needs a server, the server is replaced if it has
ended, if the loader needs more modules, if this process has loaded a module again, or if this process is a fork of the
one that started the server. A worker pool keeps the server that forked its workers.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from typing import Any

from collectives.start import child_environment, joined
from collectives.world import world_from_env
from ddp.data import worker
from ddp.errors import ArgumentError, WorkerError
from ddp.multiprocessing.connections import make_pipe

_GRACE = 2.0  # time (s) for workers to finish their task after their pool is closed

# Variables that would make a worker join the job as a rank, or start MPI when it imports a script that uses MPI.
_OF_A_RANK = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_FD", "PMI_PORT", "SLURM_STEP_NUM_TASKS")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SCRIPT = ("init_main_from_name", "init_main_from_path")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from ddp.data import worker; worker.serve({fd})"


def worker_environment() -> dict[str, str]:
    """The environment of workers: this process's, without the variables that tell MPI that a process is a rank.

    It sets one BLAS thread, keeps mpi4py from starting MPI, and names the rank for which the workers work.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PMIX_")}
    for name in _OF_A_RANK:
        environ.pop(name, None)
    environ.update(dict.fromkeys(_ONE_THREAD, "1"), MPI4PY_RC_INITIALIZE="0")
    environ.update(child_environment(joined(), world_from_env()))
    return environ


def preparation_data(script: bool) -> dict[str, Any]:
    """The data from which the standard library prepares a child process, with the user's script or without.

    Raises: ArgumentError if `script` is set, and there is no file of a script.
    """
    data = spawn.get_preparation_data("worker")
    data["sys_path"] = [path for path in sys.path if isinstance(path, str)]
    scripts = [data[name] if script else data.pop(name) for name in _SCRIPT if name in data]
    if script and (not scripts or ("init_main_from_path" in data and not os.path.exists(scripts[0]))):
        raise ArgumentError(
            "num_workers: the dataset, collate_fn or worker_init_fn is defined in an interactive session, where no"
            " worker process finds it: move it to a module that can be imported, or take num_workers=0"
        )
    return data


class ForkServer:
    """A process that imports `modules`, and then forks workers. It ends when this object is freed.

    Requests go through a socket pair, and the server inherits one end of it. So no file and no folder is needed.

    modules: names; "__main__" stands for the user's script. A module that cannot be imported is skipped

    Raises: ArgumentError if the script is needed, and has no file; WorkerError if the server cannot be started.
    """

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules
        self.owner = os.getpid()
        self._loaded = _loaded_modules()
        preparation = preparation_data("__main__" in modules)
        del preparation["authkey"]
        self._requests, child_end = make_pipe()
        program = _PROGRAM.format(path=preparation["sys_path"], fd=child_end.fileno())
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private
        try:
            with child_end:
                process = subprocess.Popen(
                    [spawn.get_executable(), *flags, "-c", program],
                    env=worker_environment(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_end.fileno()],
                )
            self.pid = process.pid
            process.returncode = 0  # `fits` and `__del__` wait for its pid; without this, Popen would warn
            self._requests.send((preparation, sorted(modules - {"__main__"})))
        except OSError as error:
            raise WorkerError(f"the fork server of worker processes cannot be started: {error}") from error

    def fits(self, modules: set[str]) -> bool:
        """Whether the server can fork workers that need `modules`.

        It must run, have been started by this process, and import `modules`. Since the server was started, this process
        must not have loaded a module again.
        """
        same = all(self._loaded.get(name, spec) is spec for name, spec in _loaded_modules().items())
        if not (same and modules <= self.modules and self.owner == os.getpid()):
            return False
        with contextlib.suppress(ChildProcessError):  # another part of the program has waited for it
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def fork(self, fds: list[int]) -> int:
        """Asks for a worker process that inherits these descriptors.

        Returns the descriptor of a socket. At the socket's other end the process reads what it is to run. There the
        server writes the pid of the process, then its exit code. Raises: WorkerError if the server has ended.
        """
        tracker: Any = resource_tracker.getfd()  # never None on Linux
        ours, child_end = make_pipe()
        with ours, child_end:
            try:
                self._requests.post(b"", [child_end.fileno(), tracker, *fds])
            except OSError as error:
                raise WorkerError(f"the fork server of worker processes has ended: {error}") from error
            return os.dup(ours.fileno())

    def __del__(self) -> None:
        # Skipped while the interpreter exits, which ends the server anyway, and in a forked child, because the server
        # belongs to the parent.
        if not sys.is_finalizing() and os.getpid() == self.owner and hasattr(self, "pid"):
            self._requests.close()  # ends the server
            _in_background(os.waitpid, self.pid, 0)


def _loaded_modules() -> dict[str, Any]:
    """The spec of each module of this process. A module that is loaded again has a new spec."""
    # Loops over a copy: another thread may import a module meanwhile. No thread can interrupt `copy`.
    return {name: getattr(module, "__spec__", None) for name, module in sys.modules.copy().items()}


def _in_background(fn: Callable[..., Any], *args: Any) -> None:
    """Runs `fn`, which waits for processes, in a thread.

    Does nothing if no thread can be started: for example while the interpreter exits, when the server ends anyway.
    """

    def run() -> None:
        with contextlib.suppress(OSError):  # the process has been waited for already
            fn(*args)

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=run, name="ddp-data-reaper", daemon=True).start()


_server: ForkServer | None = None
_lock = threading.Lock()


def fork_server(names: Iterable[str]) -> ForkServer:
    """Returns the fork server of this process, which imports the modules `names`.

    Starts one if there is none yet, or if the current one does not fit (`ForkServer.fits`).

    Raises: WorkerError if it cannot be started; ArgumentError if the script is needed and has no file, or if this is
    called in a fork server that imports the script.
    """
    global _server
    if worker.importing_script:
        raise ArgumentError("this script starts a DataLoader's worker processes wherever it is imported")
    wanted = set(names)
    with _lock:
        if _server is None or not _server.fits(wanted):
            _server = ForkServer(wanted if _server is None else _server.modules | wanted)
        return _server


def modules_of(*objects: Any) -> set[str]:
    """The modules that define these functions and classes, without `builtins` and the modules of ddp."""
    names = {name for item in objects if isinstance(name := getattr(item, "__module__", None), str)}
    return {name for name in names if name.partition(".")[0] not in ("builtins", "ddp")}


class WorkerProcess(popen_forkserver.Popen):
    """A worker process, which runs `worker.run(*args)`. `wait`, `kill` and `poll` are the standard library's.

    `wait_for_start` sets `pid`. The constructor does not wait for the fork, so that several can be asked for at once.
    """

    pid = 0

    def __init__(self, server: ForkServer, args: tuple[Any, ...]) -> None:
        self._server = server
        super().__init__(context.ForkServerProcess(target=worker.run, args=args))

    def _launch(self, process_obj: Any) -> None:
        """Launches as the standard library does, but without the script, and from our own server."""
        file = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation_data(script=False), file)
            reduction.dump(process_obj, file)
        finally:
            context.set_spawning_popen(None)
        self.sentinel = self._server.fork(self._fds)  # type: ignore[attr-defined]  # private
        # While this is open, the worker's `parent_process()` counts as alive.
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel,))  # type: ignore[attr-defined]  # private
        # If the server has ended, `wait_for_start` raises.
        with contextlib.suppress(OSError), open(self.sentinel, "wb", closefd=False) as start:
            start.write(file.getbuffer())

    def wait_for_start(self) -> None:
        """Waits until the server has forked the process, and sets `pid`.

        Raises: WorkerError if the server has ended.
        """
        try:
            self.pid = self.pid or forkserver.read_signed(self.sentinel)
        except (EOFError, OSError):
            raise WorkerError("the fork server of worker processes has ended") from None


def end_workers(processes: list[WorkerProcess]) -> None:
    """Kills the workers that have not ended after `_GRACE` seconds. Returns at once: a thread does this.

    The caller has closed the connections of the workers.
    """

    def reap() -> None:
        deadline = time.monotonic() + _GRACE
        for process in processes:
            with contextlib.suppress(WorkerError):  # the server has ended, and its workers with it
                process.wait_for_start()  # the pool may have been interrupted before it called this
                if process.wait(max(0.0, deadline - time.monotonic())) is None:
                    process.kill()

    _in_background(reap)
