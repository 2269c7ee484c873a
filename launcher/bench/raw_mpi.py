"""MPI itself, by mpi4py: the meeting place of ranks that are processes, and a rival.

The rival calls MPI.COMM_WORLD with arrays of equal lengths, as scripts that use mpi4py directly do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.bench.contestants import Call, OnHost, ping_pong
from launcher.bench.expected import Array
from launcher.bench.kinds import ROOT, Kind, partner


class MPIMeeting:
    """Ranks meet by blocking MPI calls, which spin: they leave its barrier within a microsecond of each other."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI: Any = MPI
        self._comm = MPI.COMM_WORLD.Dup()

    def sync(self) -> None:
        self._comm.Barrier()

    def slowest(self, seconds: Array) -> Array:
        worst = np.empty_like(seconds)
        self._comm.Allreduce(seconds, worst, self.MPI.MAX)
        return worst

    def total(self, number: int) -> int:
        return int(self._comm.allreduce(number))

    def tell(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return str(self._comm.bcast(text, 0))


class RawMPI(OnHost):
    """mpi4py's blocking calls."""

    name = "mpi4py"

    def __init__(self, meeting: MPIMeeting) -> None:
        self._MPI = meeting.MPI
        self.refusals: tuple[type[Exception], ...] = (NotImplementedError, KeyError, meeting.MPI.Exception)
        self._comm: Any = meeting.MPI.COMM_WORLD

    def bind(self, kind: Kind, x: Any, out: Any, op: str) -> Call:
        MPI, comm = self._MPI, self._comm
        if kind.reduces and op == "mean":
            raise NotImplementedError("MPI has no mean")
        in_place = x is not None and out is not None and np.shares_memory(x, out)
        if kind.name == "reduce_scatter" and in_place:
            raise NotImplementedError("MPI's result in place lies in front of the buffer, not in the rank's part")
        operator = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}.get(op)
        root = comm.rank == ROOT
        # In place, MPI is told so instead of being given a part of the other buffer.
        sent = MPI.IN_PLACE if in_place else x
        into = MPI.IN_PLACE if in_place else out
        whole = out if root else None
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(sent, out, operator),
            "reduce": lambda: comm.Reduce(sent if root else x, whole, operator, ROOT),
            "broadcast": lambda: comm.Bcast(x, ROOT),
            "gather": lambda: comm.Gather(sent if root else x, whole, ROOT),
            "scatter": lambda: comm.Scatter(x if root else None, into if root else out, ROOT),
            "all_gather": lambda: comm.Allgather(sent, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out, operator),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "barrier": comm.Barrier,
        }
        if kind.name != "send_recv":
            return calls[kind.name]
        other = partner(comm.rank, comm.size)
        return ping_pong(comm.rank, other, lambda: comm.Send(x, other), lambda: comm.Recv(out, other))

    def close(self) -> None:
        return
