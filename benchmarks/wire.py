"""What the wire itself gives: as many bytes as an all-reduce of two ranks sends, both ways at once, over bare TCP."""

from __future__ import annotations

import select
import socket
from typing import Any

from benchmarks.contestants import Array, Call

LIMIT = 120.0  # s


class Wire:
    """A TCP connection between ranks 0 and 1 of `MPI.COMM_WORLD`; rank 0 is at `address`. Collective."""

    def __init__(self, MPI: Any, address: str) -> None:
        world = MPI.COMM_WORLD
        if world.rank == 0:
            with socket.create_server((address, 0)) as server:
                server.settimeout(LIMIT)
                world.bcast(server.getsockname()[1])
                self.stream, _ = server.accept()
        else:
            self.stream = socket.create_connection((address, world.bcast(None)), LIMIT)
        self.stream.setblocking(False)

    def exchange(self, x: Array, y: Array) -> None:
        """Sends all of x and fills y. Raises: TimeoutError if nothing moves for two minutes."""
        out, room = memoryview(x).cast("B"), memoryview(y).cast("B")
        while out or room:
            reading = [self.stream] if room else []
            writing = [self.stream] if out else []
            readable, writable, _ = select.select(reading, writing, [], LIMIT)
            if readable:
                got = self.stream.recv_into(room)
                assert got, "the other rank closed the connection"
                room = room[got:]
            if writable:
                out = out[self.stream.send(out) :]
            if not readable and not writable:
                raise TimeoutError(f"nothing moved for {LIMIT:g} s")


def wire(stream: Wire, x: Array, y: Array) -> Call:
    """Two ranks that reduce N bytes must each send N: half of x to be added, and half of the result."""
    return lambda: stream.exchange(x, y)
