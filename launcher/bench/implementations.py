"""The implementations that are measured: ours on ordinary, shared or device arrays, mpi4py, and PyTorch's gloo.

An implementation binds a collective to two buffers, and returns a function without arguments, so that only the
collective itself is timed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives import Communicator, DtypeError
from launcher.bench.collective_table import ROOT, Collective, partner
from launcher.bench.expected import Array
from launcher.bench.settings import Settings

Call = Callable[[], Any]


class Implementation:
    """A library of collectives. This base class has buffers in private memory, and blocking calls.

    name: its name in tables and legends
    unsupported: the exceptions that it raises for calls that it does not support
    """

    name: str
    unsupported: tuple[type[Exception], ...]

    def empty(self, nbytes: int) -> Any:
        """A buffer of zeros: (nbytes,) uint8. Collective."""
        return np.zeros(nbytes, np.uint8)

    def write(self, buffer: Any, values: Array) -> None:
        """Fills a buffer with values of its dtype."""
        buffer[...] = values

    def read(self, buffer: Any) -> Array:
        """The contents of a buffer."""
        return np.asarray(buffer)

    def bind(self, collective: Collective, x: Any, out: Any, op: str) -> Call:
        """A function that runs the collective on these buffers; out None: it writes to x.

        Raises: one of `unsupported`, here or at the first call, if the library does not support this.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Waits for the work of calls that have returned."""

    def close(self) -> None:
        """Releases what it holds; called once, at the end."""


class Ours(Implementation):
    """`collectives` on ordinary arrays."""

    unsupported: tuple[type[Exception], ...] = (DtypeError,)

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.name = f"ours {comm.backend}"

    def bind(self, collective: Collective, x: Any, out: Any, op: str) -> Call:
        comm = self.comm
        # As in the baselines, ranks need not exchange lengths: they know that all are equal.
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.all_reduce(x, op, out=out),
            "reduce": lambda: comm.reduce(x, op, ROOT, out=out),
            "broadcast": lambda: comm.broadcast(x, ROOT),
            "gather": lambda: comm.gather(x, ROOT, lengths="equal", out=out),
            "scatter": lambda: comm.scatter(x, ROOT, out=out),
            "all_gather": lambda: comm.all_gather(x, lengths="equal", out=out),
            "reduce_scatter": lambda: comm.reduce_scatter(x, op, out=out),
            "all_to_all": lambda: comm.all_to_all(x, lengths="equal", out=out),
            "barrier": comm.barrier,
        }
        if collective.name != "send_recv":
            return calls[collective.name]
        other = partner(comm.rank, comm.size)
        peer = -1 if other is None else other
        return ping_pong(comm.rank, other, lambda: comm.send(x, peer), lambda: comm.recv(peer, out=out))


class OursShared(Ours):
    """`collectives` on arrays of `comm.empty`, which the ranks of a node share."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.name = f"ours {comm.backend} empty"

    def empty(self, nbytes: int) -> Any:
        array = self.comm.empty((nbytes,), np.uint8)
        array[...] = 0  # touches every page before the first call
        return array


def ping_pong(rank: int, other: int | None, send: Call, receive: Call) -> Call:
    """A function that makes a round trip between two ranks; the lower one sends first. other None: it does nothing."""
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def call() -> None:
        first()
        second()

    return call


class OursOnDevice(Ours):
    """`collectives` on CuPy arrays. A call returns when it is enqueued: `settle` waits for the stream."""

    def __init__(self, comm: Communicator) -> None:
        import cupy

        super().__init__(comm)
        self._cupy: Any = cupy

    def empty(self, nbytes: int) -> Any:
        return self._cupy.zeros(nbytes, np.uint8)

    def write(self, buffer: Any, values: Array) -> None:
        buffer[...] = self._cupy.asarray(values)

    def read(self, buffer: Any) -> Array:
        return self._cupy.asnumpy(buffer)

    def settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


class RawMPI(Implementation):
    """mpi4py's blocking calls."""

    name = "mpi4py"

    def __init__(self, MPI: Any) -> None:
        self._MPI = MPI
        self.unsupported: tuple[type[Exception], ...] = (NotImplementedError, BufferError, KeyError, MPI.Exception)
        self._comm: Any = MPI.COMM_WORLD

    def bind(self, collective: Collective, x: Any, out: Any, op: str) -> Call:
        MPI = self._MPI
        comm = self._comm
        if collective.reduces and op == "mean":
            raise NotImplementedError("MPI has no mean")
        in_place = x is not None and out is not None and np.shares_memory(x, out)
        if collective.name == "reduce_scatter" and in_place:
            raise NotImplementedError("MPI's result in place lies in front of the buffer, not in the rank's part")
        operator = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}.get(op)
        root = comm.rank == ROOT
        # In place, x is a part of out, or out is a part of x. MPI gets MPI.IN_PLACE instead of that part.
        sent = MPI.IN_PLACE if in_place else x
        received = MPI.IN_PLACE if in_place else out
        root_out = out if root else None
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(sent, out, operator),
            "reduce": lambda: comm.Reduce(sent if root else x, root_out, operator, ROOT),
            "broadcast": lambda: comm.Bcast(x, ROOT),
            "gather": lambda: comm.Gather(sent if root else x, root_out, ROOT),
            "scatter": lambda: comm.Scatter(x if root else None, received if root else out, ROOT),
            "all_gather": lambda: comm.Allgather(sent, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out, operator),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "barrier": comm.Barrier,
        }
        if collective.name != "send_recv":
            return calls[collective.name]
        other = partner(comm.rank, comm.size)
        return ping_pong(comm.rank, other, lambda: comm.Send(x, other), lambda: comm.Recv(out, other))


class Gloo(Implementation):
    """torch.distributed with gloo, over a process group of its own."""

    name = "torch-gloo"
    unsupported: tuple[type[Exception], ...] = (NotImplementedError, RuntimeError, TypeError, ValueError)

    def __init__(self, MPI: Any, rank: int, size: int, one_node: bool) -> None:
        import torch
        import torch.distributed

        self._torch: Any = torch
        self._dist: Any = torch.distributed
        dist = self._dist
        self._rank = rank
        self._size = size
        if one_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1" if one_node else os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(host, 0, size, True, wait_for_workers=False) if rank == 0 else None
        host, port = MPI.COMM_WORLD.bcast((host, store.port) if store is not None else None, 0)
        if store is None:
            store = dist.TCPStore(host, port, size, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def bind(self, collective: Collective, x: Any, out: Any, op: str) -> Call:
        dist = self._dist
        if collective.reduces and op == "mean":
            raise NotImplementedError("gloo has no mean")
        in_place = out is None or (x is not None and np.shares_memory(x, out))
        if collective.name in ("all_reduce", "reduce") and not in_place:
            raise NotImplementedError("torch.distributed reduces in place")
        ops = dist.ReduceOp
        operator = {"sum": ops.SUM, "prod": ops.PRODUCT, "max": ops.MAX, "min": ops.MIN}.get(op)
        sent = self._tensor(x)
        received = self._tensor(out)
        root = self._rank == ROOT
        size = self._size
        parts = []
        if collective.out == "whole":
            parts = list(received.chunk(size))
        elif collective.x == "whole":
            parts = list(sent.chunk(size))
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(sent, operator),
            "reduce": lambda: dist.reduce(sent, ROOT, operator),
            "broadcast": lambda: dist.broadcast(sent, ROOT),
            "gather": lambda: dist.gather(sent, parts if root else None, ROOT),
            "scatter": lambda: dist.scatter(received, parts if root else None, ROOT),
            "all_gather": lambda: dist.all_gather(parts, sent),
            "reduce_scatter": lambda: dist.reduce_scatter(received, parts, operator),
            "all_to_all": lambda: dist.all_to_all_single(received, sent),
            "barrier": dist.barrier,
        }
        if collective.name != "send_recv":
            return calls[collective.name]
        other = partner(self._rank, size)
        return ping_pong(self._rank, other, lambda: dist.send(sent, other), lambda: dist.recv(received, other))

    def close(self) -> None:
        self._dist.destroy_process_group()

    def _tensor(self, array: Any) -> Any:
        if array is None:
            return None
        if array.dtype.name == "bfloat16":  # torch.from_numpy does not take it
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)


def find(comm: Communicator, settings: Settings) -> tuple[Callable[[], object], list[Implementation]]:
    """A barrier that ranks leave at about the same moment, and the implementations: ours first, then the baselines."""
    ours: list[Implementation] = [OursOnDevice(comm) if comm.backend == "nccl" else Ours(comm)]
    if settings.empty:
        ours.append(OursShared(comm))
    if comm.backend == "threads" or (comm.size == 1 and not settings.vs):
        return comm.barrier, ours
    from mpi4py import MPI

    for name in settings.vs:
        one_node = comm.local_size == comm.size
        ours.append(RawMPI(MPI) if name == "mpi4py" else Gloo(MPI, comm.rank, comm.size, one_node))
    # A blocking call of MPI spins: ranks that each have a core leave it within about a microsecond of each other.
    return MPI.COMM_WORLD.Dup().Barrier, ours
