"""Who is measured: the same collective on the same buffers, as its users write it with each library.

Buffers are flat float32: x is what a rank gives, y is where it gets the result. Sizes are of the longest buffer that a
collective knows: all of x for a reduction, the joined result of a gather, what is split by a scatter.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]
Make = Callable[[Any, Array, Array], Call]  # (library, x, y) → the call to be timed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a collective reads and writes: `part` is a rank's share of the whole; `root` has its y on rank 0 alone."""

    x_part: bool = False
    y_part: bool = False
    y_root: bool = False
    in_place: bool = False  # x is read and written, there is no y


SHAPES = {
    "all_reduce": Shape(),
    "reduce": Shape(y_root=True),
    "broadcast": Shape(in_place=True),
    "gather": Shape(x_part=True, y_root=True),
    "scatter": Shape(y_part=True),
    "all_gather": Shape(x_part=True),
    "reduce_scatter": Shape(y_part=True),
    "all_to_all": Shape(),
    "send, recv": Shape(),
    "isend, irecv": Shape(),
    "barrier": Shape(in_place=True),
}


#: From one rank to another and back: a call's time is half of a turn's.
TO_AND_FRO = ("send, recv", "isend, irecv")


def expected(name: str, rank: int, size: int, n: int) -> Array | None:
    """What a rank's result must be after every rank gave n (or its share of n) numbers of its rank + 1."""
    joined = np.repeat(np.arange(1, size + 1, dtype=np.float32), n // size)
    total = np.float32(size * (size + 1) // 2)
    if name == "all_reduce":
        return np.full(n, total)
    if name == "reduce":
        return np.full(n, total) if rank == 0 else None
    if name == "broadcast":
        return np.ones(n, np.float32)
    if name == "gather":
        return joined if rank == 0 else None
    if name == "scatter":
        return np.ones(n // size, np.float32)
    if name in ("all_gather", "all_to_all"):
        return joined
    if name == "reduce_scatter":
        return np.full(n // size, total)
    if name in TO_AND_FRO:
        other = partner(rank, size)
        return None if other is None else np.full(n, np.float32(other + 1))
    return None


def partner(rank: int, size: int) -> int | None:
    """Whom a rank sends to and receives from; the last of an odd number has nobody."""
    other = rank ^ 1
    return other if other < size else None


def ours(name: str, in_place: bool = False) -> Make:
    """The call of `collectives`."""

    def make(comm: Any, x: Array, y: Array) -> Call:
        other = partner(comm.rank, comm.size)
        if name == "all_reduce":
            return (lambda: comm.all_reduce(x, out=x)) if in_place else lambda: comm.all_reduce(x, out=y)
        if name == "broadcast":
            return lambda: comm.broadcast(x)
        if name == "barrier":
            return lambda: comm.barrier()
        if name == "send, recv":
            there, back = (lambda: comm.send(x, other)), (lambda: comm.recv(other, out=y))
            return _there_and_back(there, back, comm.rank, other)
        if name == "isend, irecv":
            there, back = (
                (lambda: comm.send(x, other, async_op=True).wait()),
                (lambda: comm.recv(other, out=y, async_op=True).wait()),
            )
            return _there_and_back(there, back, comm.rank, other)
        method = getattr(comm, name)
        return lambda: method(x, out=y)

    return make


def raw(name: str, in_place: bool = False) -> Make:
    """The call of mpi4py, with buffers."""

    def make(MPI: Any, x: Array, y: Array) -> Call:
        world = MPI.COMM_WORLD
        at_root = y if world.rank == 0 else None
        other = partner(world.rank, world.size)
        if name == "all_reduce" and in_place:
            return lambda: world.Allreduce(MPI.IN_PLACE, x)
        if name == "send, recv":
            return _there_and_back(lambda: world.Send(x, other), lambda: world.Recv(y, other), world.rank, other)
        if name == "isend, irecv":
            there, back = (lambda: world.Isend(x, other).Wait()), (lambda: world.Irecv(y, other).Wait())
            return _there_and_back(there, back, world.rank, other)
        calls: dict[str, Call] = {
            "all_reduce": lambda: world.Allreduce(x, y),
            "reduce": lambda: world.Reduce(x, at_root),
            "broadcast": lambda: world.Bcast(x),
            "gather": lambda: world.Gather(x, at_root),
            "scatter": lambda: world.Scatter(x if world.rank == 0 else None, y),
            "all_gather": lambda: world.Allgather(x, y),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, y),
            "all_to_all": lambda: world.Alltoall(x, y),
            "barrier": lambda: world.Barrier(),
        }
        return calls[name]

    return make


def gloo(name: str) -> Make:
    """The call of torch.distributed with gloo, in place where it knows no other way (all_reduce, reduce, broadcast)."""

    def make(dist: Any, x: Array, y: Array) -> Call:
        import torch

        rank, size = dist.get_rank(), dist.get_world_size()
        given, got = torch.from_numpy(x), torch.from_numpy(y)
        parts_in, parts_out = list(given.chunk(size)), list(got.chunk(size))
        other = partner(rank, size)
        if name == "send, recv":
            return _there_and_back(lambda: dist.send(given, other), lambda: dist.recv(got, other), rank, other)
        if name == "isend, irecv":
            there, back = (lambda: dist.isend(given, other).wait()), (lambda: dist.irecv(got, other).wait())
            return _there_and_back(there, back, rank, other)
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(given),
            "reduce": lambda: dist.reduce(given, 0),
            "broadcast": lambda: dist.broadcast(given, 0),
            "gather": lambda: dist.gather(given, parts_out if rank == 0 else None, 0),
            "scatter": lambda: dist.scatter(got, parts_in if rank == 0 else None, 0),
            "all_gather": lambda: dist.all_gather_single(got, given),
            "reduce_scatter": lambda: dist.reduce_scatter_single(got, given),
            "all_to_all": lambda: dist.all_to_all_single(got, given),
            "barrier": lambda: dist.barrier(),
        }
        return calls[name]

    return make


def _there_and_back(send: Call, recv: Call, rank: int, other: int | None) -> Call:
    if other is None:
        return lambda: None

    def ping() -> None:
        if rank < other:
            send()
            recv()
        else:
            recv()
            send()

    return ping


WIRE_LIMIT = 120.0  # s


class Wire:
    """A TCP connection between ranks 0 and 1 of `MPI.COMM_WORLD`; rank 0 is at `address`. Collective."""

    def __init__(self, MPI: Any, address: str) -> None:
        world = MPI.COMM_WORLD
        if world.rank == 0:
            with socket.create_server((address, 0)) as server:
                server.settimeout(WIRE_LIMIT)
                world.bcast(server.getsockname()[1])
                self.stream, _ = server.accept()
        else:
            self.stream = socket.create_connection((address, world.bcast(None)), WIRE_LIMIT)
        self.stream.setblocking(False)

    def exchange(self, x: Array, y: Array) -> None:
        """Sends all of x and fills y. Raises: TimeoutError if nothing moves for two minutes."""
        out, room = memoryview(x).cast("B"), memoryview(y).cast("B")
        while out or room:
            reading = [self.stream] if room else []
            writing = [self.stream] if out else []
            readable, writable, _ = select.select(reading, writing, [], WIRE_LIMIT)
            if readable:
                got = self.stream.recv_into(room)
                assert got, "the other rank closed the connection"
                room = room[got:]
            if writable:
                out = out[self.stream.send(out) :]
            if not readable and not writable:
                raise TimeoutError(f"nothing moved for {WIRE_LIMIT:g} s")


def wire(stream: Wire, x: Array, y: Array) -> Call:
    """Two ranks that reduce N bytes must each send N: half of x to be added, and half of the result."""
    return lambda: stream.exchange(x, y)
