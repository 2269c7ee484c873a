"""Joining the world: chooses the backend, once, and makes the communicator of all ranks.

`run_threads` makes a world of threads instead, within milliseconds, to test collectives and code that uses them.
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
from collectives.backends.shm.hierarchy import use_shared_memory
from collectives.backends.single import DetachedTransport
from collectives.backends.threads import ThreadGroup, ThreadTransport
from collectives.communicator import Communicator
from collectives.engine.communicator_base import check_timeout
from collectives.engine.queue import run_to_completion
from collectives.engine.registry import CommunicatorRegistry
from collectives.engine.shutdown import ExitStatus, exit_code, shut_down
from collectives.errors import ArgumentError, BackendError, CollectiveTimeout, PeerLeft, name_ranks
from collectives.flight.recorder import process_recorder, start_sampler
from collectives.time_limit import Deadline
from collectives.transport import ExitNotice, RankInfo, is_clean
from collectives.world import WORKER_OF, World, started_by_torchrun, torchrun_job, world_from_env

T = TypeVar("T")

# In `run_threads`, the whole run may take this much longer than a collective (s). So a timeout of a collective is
# reported first, by a message that names the collective.
_GRACE = 1.0

_local = threading.local()


def simulated_communicator() -> Communicator | None:
    """The communicator of the simulated rank that this thread runs; None in all other threads."""
    comm: Communicator | None = getattr(_local, "comm", None)
    return comm


def run_threads(fn: Callable[[Communicator], T], size: int = 4, *, timeout: float = 60.0) -> list[T]:
    """Runs `fn(comm)` on `size` ranks, each a thread of this process.

    fn: gets the rank's communicator, which `collectives.init()` also returns in that thread
    timeout: seconds; the time limit of every collective. The whole run may take one second more
    Returns: each rank's result, in rank order

    Raises: the first exception that a rank raised, but PeerLeft only if there is no other; CollectiveTimeout, which
    names the ranks that do not end in time; ArgumentError if size is not an integer above 0, or timeout not a number
    above 0.
    """
    if not isinstance(size, int) or size < 1:
        raise ArgumentError(f"size should be at least 1, is {size!r}")
    timeout = check_timeout(timeout)
    group = ThreadGroup(size)
    exit_notices: dict[int, ExitNotice] = {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        comm = Communicator(ThreadTransport(group, rank, exit_notices), timeout)
        _local.comm = comm
        status = 1
        try:
            results[rank] = fn(comm)
            status = 0
        except SystemExit as exit_:
            errors.append(exit_)
            status = exit_code(exit_.code)
        except BaseException as error:  # re-raised in the caller's thread
            errors.append(error)
        finally:
            comm.registry.drain(Deadline(timeout if is_clean(status) else 0.0))
            exit_notices[rank] = ExitNotice(status=status, calls=comm.registry.calls())
            comm.registry.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout + _GRACE)
    for thread in threads:
        while thread.is_alive() and not deadline.passed():
            thread.join(deadline.remaining())
    causes = [error for error in errors if not isinstance(error, PeerLeft)] or errors
    if causes:
        raise causes[0]
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise CollectiveTimeout(f"{name_ranks(late)} of {size} still ran after {timeout:g} s")
    return [results[rank] for rank in range(size)]


# How many calls of a communicator are compared between nodes; None: all.
_CHECKS = {"first": 100, "always": None}

# Prefixes of the names of processes that start ranks.
_ENGINES = ("hydra", "mpiexec", "mpirun", "orte", "prte", "slurmstepd", "srun")

_lock = threading.Lock()
_world: Communicator | None = None


def init(
    backend: str = "auto", timeout: float = 600.0, check: str = "first", nccl: NcclConfig | None = None
) -> Communicator:
    """The communicator of all ranks. The first call is collective.

    Later calls return the same communicator, whatever their timeout, check and nccl.

    backend: "auto" takes "mpi" if an engine, torchrun or another launcher started several ranks, else "single", which
    loads no MPI library. `ddp-launch --backend` sets what "auto" takes. A backend requested by name is never replaced
    by another. Arrays on GPUs work with every backend. Between several ranks they go over NCCL if all ranks can use it,
    which the ranks find out together at the first array on a GPU. "nccl" means "auto", but the ranks find out at once,
    and all raise if one of them cannot use NCCL
    timeout: seconds; the time limit of every collective, of joining and of exit; math.inf: none. A process whose MPI
    does not start in time is ended, without an exception
    check: "first": ranks on different nodes compare the first 100 calls of each communicator; "always": all calls, at
    the cost of one small exchange per call. Ranks that share memory on one node compare every call in both cases. It
    must be the same on every rank
    nccl: options of NCCL's communicators (thread blocks, network, ...); the same on every rank

    Inside `run_threads`, returns the calling rank's communicator. In a process that one of several ranks has forked or
    started (a worker of a DataLoader, a subprocess, a pool), returns a communicator that has the rank's numbers, and
    whose calls raise WorldError.

    With several ranks, `init` also divides the node's cores and GPUs among them, unless a launcher has done so. BLAS
    gets as many threads as this rank's share of the node has cores, unless OMP_NUM_THREADS or a similar variable is
    set. If this rank's current GPU is the first of several, the GPU with the number of its local rank, modulo the
    number of GPUs, becomes the current one.

    Raises: WorldError if the world is not the one that the launcher promised, or cannot be reached; BackendError if the
    backend is unknown, cannot be used, or differs from the one in use; ArgumentError if check or timeout is invalid;
    ValueError if a variable of the launcher should be a number and is not; CollectiveTimeout or PeerLeft if a rank does
    not take part after MPI has started.
    """
    simulated = simulated_communicator()
    if simulated is not None:
        return simulated
    backend = requested_backend(backend, os.environ)
    if check not in _CHECKS:
        raise ArgumentError(f"check should be one of {', '.join(_CHECKS)}, is {check!r}")
    timeout = check_timeout(timeout)
    global _world
    with _lock:
        if _world is None:
            rank_info = inherited_rank_info(os.environ)
            if rank_info is not None:
                registry = CommunicatorRegistry(None if backend == "auto" else backend)
                _world = Communicator(DetachedTransport(rank_info), timeout, registry)
                return _world
            _world = _join(backend, timeout, _CHECKS[check], nccl)
        elif backend not in ("auto", _world.backend):
            raise BackendError(f"backend {backend!r} was asked for, but this process already uses {_world.backend!r}")
        return _world


def requested_backend(backend: str, environ: Mapping[str, str]) -> str:
    """The backend's name: the script's choice or, if that is "auto", the choice of `ddp-launch --backend`, if any.

    Raises: BackendError if there is no such backend.
    """
    source = "backend"
    if backend == "auto" and world.BACKEND in environ:
        source = f"environment variable {world.BACKEND}"
        backend = environ[world.BACKEND]
    if backend not in ("auto", "nccl") and _backend(backend) is None:
        modules = [module.name for module in pkgutil.iter_modules(backends.__path__)]
        names = ", ".join(name for name in modules if _backend(name) is not None)
        raise BackendError(f"{source} should be one of auto, nccl, {names}, is {backend!r}")
    return backend


def _backend(name: str) -> ModuleType | None:
    """The module of that backend; None if no backend has this name."""
    try:
        module = importlib.import_module(f"{backends.__name__}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(backends.__name__):
            raise  # The backend exists, but something that it imports does not.
        return None
    return module if hasattr(module, "join") else None


def choose_backend(backend: str, expected: World | None) -> str:
    """The backend that moves host arrays in the expected world. "nccl" means "auto" here: NCCL does not move them."""
    if backend in ("auto", "nccl"):
        return "single" if expected is None or expected.size == 1 else "mpi"
    return backend


def _join(backend: str, timeout: float, checks: int | None, nccl: NcclConfig | None) -> Communicator:
    registry = CommunicatorRegistry("nccl" if backend == "nccl" else None, nccl)
    expected = world_from_env()
    module = _backend(choose_backend(backend, expected))
    assert module is not None
    inner, membership = module.join(expected, timeout, checks)
    if membership is None:
        comm = Communicator(inner, timeout, registry)
        comm.connect_nccl()
        return comm
    recorder = process_recorder()
    recorder.identify(membership.rank, membership.size)
    if membership.size > 1:
        start_sampler(recorder)
    transport = run_to_completion("init", use_shared_memory(inner), inner, timeout)
    comm = Communicator(transport, timeout, registry)
    status = ExitStatus(lambda: sum(registry.calls().values()))
    status.watch()
    pid = os.getpid()

    def leave() -> None:
        if os.getpid() == pid:  # A forked child also calls this at its exit. Then this rank has not left.
            shut_down(membership, registry, status.status(), timeout, world.supervised())

    atexit.register(leave)
    os.environ.update(child_environment(comm, None, pid))
    comm.connect_nccl()
    return comm


def joined() -> Communicator | None:
    """The communicator of all ranks; None before the first `init`."""
    return _world


def child_environment(comm: Communicator | None, expected: World | None, pid: int | None = None) -> dict[str, str]:
    """The environment variables that tell a process which rank it works for; none if comm and expected are None.

    comm: the communicator of all ranks; None if this rank has not joined them yet
    expected: the world that the engine promised; None without an engine
    pid: of this process, if the variables are meant only for its descendants
    """
    if comm is not None:
        rank_info = RankInfo(comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node)
    elif expected is not None:
        rank_info = RankInfo(expected.rank, expected.size, expected.local_rank or 0, expected.local_size or 1, 0)
    else:
        return {}
    numbers = " ".join(map(str, rank_info if pid is None else (*rank_info, pid)))
    return {WORKER_OF: f"{numbers};{torchrun_job(os.environ)}"}


def inherited_rank_info(environ: Mapping[str, str]) -> RankInfo | None:
    """The numbers of the rank for which this process works; None if it does not work for a rank.

    If WORKER_OF contains a pid, it is valid only in descendants of that process. They must also have inherited the
    engine's variables: a program that was started without them is a world of its own. If the rank has started
    torchrun, the ranks of torchrun do not work for it either.
    """
    if WORKER_OF not in environ or started_by_torchrun(environ):
        return None
    numbers = [int(word) for word in environ[WORKER_OF].partition(";")[0].split()]
    rank_info = RankInfo._make(numbers[:5])
    pid = numbers[5:]
    return rank_info if not pid or (world_from_env(environ) is not None and _works_for(pid[0])) else None


def _works_for(pid: int) -> bool:
    """True if that process is an ancestor of this one, and no engine between them has started another world."""
    ancestor = os.getppid()
    try:
        while ancestor not in (0, pid):
            with open(f"/proc/{ancestor}/stat") as stat:
                name, _, fields = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(_ENGINES):
                return False
            ancestor = int(fields.split()[1])
    except OSError:  # no /proc, or an ancestor has just ended
        return False
    return ancestor == pid
