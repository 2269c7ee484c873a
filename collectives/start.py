"""Joining the world: which backend serves it, decided once, and the one communicator of all ranks.

`run_threads` makes a world of threads instead: tests of collectives and of what is built on them, in milliseconds.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pkgutil
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

from collectives import backends, world
from collectives.backends.nccl.library import NcclConfig
from collectives.backends.shm.hierarchy import share
from collectives.backends.single import DetachedTransport
from collectives.backends.threads import ThreadGroup, ThreadTransport
from collectives.communicator import Communicator
from collectives.engine.communicator_base import check_timeout
from collectives.engine.queue import run_to_completion
from collectives.engine.registry import CommunicatorRegistry
from collectives.engine.shutdown import ExitStatus, exit_code, shut_down
from collectives.errors import ArgumentError, BackendError, CollectiveTimeout, PeerLeft
from collectives.flight.recorder import process_recorder, start_sampler
from collectives.time_limit import TimeLimit
from collectives.transport import ExitNotice, Placement, is_clean
from collectives.world import WORKER_OF, World, promised, started_by_torchrun, torchrun_job

T = TypeVar("T")

_SPEAK = 1.0  # s; a collective that times out names itself, which says more than "still ran"

_local = threading.local()


def simulated_communicator() -> Communicator | None:
    """The communicator of the simulated rank that this thread is, if it is one."""
    comm: Communicator | None = getattr(_local, "comm", None)
    return comm


def run_threads(fn: Callable[[Communicator], T], size: int = 4, *, timeout: float = 60.0) -> list[T]:
    """Runs `fn(comm)` on `size` ranks, each a thread of this process.

    fn: called with the rank's communicator, which `collectives.init()` returns there too
    timeout: seconds; the time limit of every collective and of the whole
    Returns: each rank's result, in rank order

    Raises: the exception of the first rank that failed; CollectiveTimeout if a rank does not end in time, naming it;
    ArgumentError if size or timeout is no number above 0.
    """
    if not isinstance(size, int) or size < 1:
        raise ArgumentError(f"size should be at least 1, is {size!r}")
    timeout = check_timeout(timeout)
    group = ThreadGroup(size)
    left: dict[int, ExitNotice] = {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        comm = Communicator(ThreadTransport(group, rank, left), timeout)
        _local.comm = comm
        status = 1
        try:
            results[rank] = fn(comm)
            status = 0
        except SystemExit as exit_:
            errors.append(exit_)
            status = exit_code(exit_.code)
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            comm.registry.drain(TimeLimit(timeout if is_clean(status) else 0.0))
            left[rank] = ExitNotice(status=status, calls=comm.registry.calls())
            comm.registry.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit = TimeLimit(timeout + _SPEAK)
    for thread in threads:
        while thread.is_alive() and not limit.passed():
            thread.join(limit.remaining())
    causes = [error for error in errors if not isinstance(error, PeerLeft)] or errors
    if causes:
        raise causes[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        raise CollectiveTimeout(f"{', '.join(late)} of {size} still ran after {timeout:g} s")
    return [results[rank] for rank in range(size)]


_CHECKS = {"first": 100, "always": None}  # how many calls of a communicator are checked between nodes

# How the names of the processes begin that start ranks.
_ENGINES = ("hydra", "mpiexec", "mpirun", "orte", "prte", "slurmstepd", "srun")

_lock = threading.Lock()
_world: Communicator | None = None


def init(
    backend: str = "auto", timeout: float = 600.0, check: str = "first", nccl: NcclConfig | None = None
) -> Communicator:
    """The communicator of all ranks. Collective at the first call; later calls return the same one.

    backend: "auto" takes "mpi" where an engine, or torchrun, started several ranks, else "single", which imports
    nothing; a backend asked for by name never falls back. Arrays on GPUs are served whatever it is: over NCCL if all
    ranks can use it, which they find out together at the first such array. "nccl" wants that known at once: it raises
    on every rank if one of them cannot. What `ddp-launch --backend` says is what "auto" takes
    timeout: seconds; the time limit of every collective, of start and of exit; math.inf: none
    check: "first" compares what ranks on different nodes call in the first 100 calls of each communicator, "always" in
    all, for one small exchange a call; ranks of one node are always compared. The same on every rank
    nccl: how NCCL's communicators are made (thread blocks, network, ...); the same on every rank
    Inside `run_threads` it returns the calling rank's communicator. In a process that a rank has started (a worker of a
    DataLoader, a subprocess, a pool) or forked, it returns one that has the rank's place in the world, and whose calls
    raise WorldError.

    In a world of several ranks it also gives each its part of the node, where no launcher has: BLAS gets as many
    threads as the rank has cores, unless OMP_NUM_THREADS or the like is set; and ranks that all stand at the first of
    several GPUs each make one of their own current.

    Raises: WorldError if the world is not the one that the launcher promised; BackendError if the backend is unknown,
    cannot be loaded, or is another than the one in use; ArgumentError if there is no such check, or no such timeout.
    """
    simulated = simulated_communicator()
    if simulated is not None:
        return simulated
    backend = asked_for(backend, os.environ)
    if check not in _CHECKS:
        raise ArgumentError(f"check should be one of {', '.join(_CHECKS)}, is {check!r}")
    timeout = check_timeout(timeout)
    global _world
    with _lock:
        if _world is None:
            placement = inherited_placement(os.environ)
            if placement is not None:
                _world = Communicator(
                    DetachedTransport(placement), timeout, CommunicatorRegistry(None if backend == "auto" else backend)
                )
                return _world
            _world = _join(backend, timeout, _CHECKS[check], nccl)
        elif backend not in ("auto", _world.backend):
            raise BackendError(f"backend {backend!r} was asked for, but this process already uses {_world.backend!r}")
        return _world


def asked_for(backend: str, environ: Mapping[str, str]) -> str:
    """The backend by name: that of `ddp-launch --backend` where the script leaves it open. Raises: BackendError."""
    said = "backend"
    if backend == "auto" and world.BACKEND in environ:
        said, backend = f"environment variable {world.BACKEND}", environ[world.BACKEND]
    if backend not in ("auto", "nccl") and _backend(backend) is None:
        found = [each.name for each in pkgutil.iter_modules(backends.__path__) if _backend(each.name) is not None]
        raise BackendError(f"{said} should be one of auto, nccl, {', '.join(found)}, is {backend!r}")
    return backend


def _backend(name: str) -> ModuleType | None:
    """The module of that backend, None if there is none."""
    try:
        module = importlib.import_module(f"{backends.__name__}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(backends.__name__):
            raise  # the backend is there, and what it imports is not
        return None
    return module if hasattr(module, "join") else None


def choose(backend: str, promised: World | None) -> str:
    """The backend of host arrays that serves the promised world; NCCL moves arrays on GPUs alone."""
    if backend in ("auto", "nccl"):
        return "single" if promised is None or promised.size == 1 else "mpi"
    return backend


def _join(backend: str, timeout: float, checks: int | None, nccl: NcclConfig | None) -> Communicator:
    registry = CommunicatorRegistry("nccl" if backend == "nccl" else None, nccl)
    engines_world = promised()
    module = _backend(choose(backend, engines_world))
    assert module is not None
    inner, membership = module.join(engines_world, timeout, checks)
    if membership is None:
        comm = Communicator(inner, timeout, registry)
        comm.connect_nccl()
        return comm
    recorder = process_recorder()
    recorder.identify(membership.rank, membership.size)
    if membership.size > 1:
        start_sampler(recorder)
    comm = Communicator(run_to_completion("init", share(inner), inner, timeout), timeout, registry)
    status = ExitStatus(lambda: sum(registry.calls().values()))
    status.watch()
    me = os.getpid()

    def leave() -> None:
        if os.getpid() == me:  # the exit of a forked child is not this rank's
            shut_down(membership, registry, status.status(), timeout, world.supervised())

    atexit.register(leave)
    os.environ.update(child_environment(comm, None, me))
    comm.connect_nccl()
    return comm


def joined() -> Communicator | None:
    """The communicator of all ranks, None before the first `init`."""
    return _world


def child_environment(comm: Communicator | None, promised: World | None, pid: int | None = None) -> dict[str, str]:
    """The variables by which a process that works for this rank knows its place.

    comm: of all ranks, None if the rank has not joined them yet; promised: what its engine said, None if there is none
    pid: of this process, if they hold for those alone that it starts
    """
    if comm is not None:
        where = Placement(comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node)
    elif promised is not None:
        where = Placement(promised.rank, promised.size, promised.local_rank or 0, promised.local_size or 1, 0)
    else:
        return {}
    numbers = " ".join(map(str, where if pid is None else (*where, pid)))
    return {WORKER_OF: f"{numbers};{torchrun_job(os.environ)}"}


def inherited_placement(environ: Mapping[str, str]) -> Placement | None:
    """Where the rank stands that this process works for, None if it works for none.

    With the rank's pid, the variable holds for processes below it in the process tree, and only where the engine's
    variables were inherited, too: a program that was started without them is a world of its own. So are the ranks of a
    torchrun that the rank has started.
    """
    if WORKER_OF not in environ or started_by_torchrun(environ):
        return None
    numbers = [int(word) for word in environ[WORKER_OF].partition(";")[0].split()]
    where, rank = Placement._make(numbers[:5]), numbers[5:]
    return where if not rank or (promised(environ) is not None and _works_for(rank[0])) else None


def _works_for(pid: int) -> bool:
    """True if that process is above this one, and no engine between them, which starts ranks of other worlds."""
    above = os.getppid()
    try:
        while above not in (0, pid):
            with open(f"/proc/{above}/stat") as stat:
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(_ENGINES):
                return False
            above = int(rest.split()[1])
    except OSError:  # no /proc, or an ancestor has just ended
        return False
    return above == pid
