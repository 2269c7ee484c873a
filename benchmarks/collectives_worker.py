"""One rank of `collectives.py` and `two_hosts.py`: runs rounds in which every implementation has its turn.

    echo '{"rows": [["all_reduce", 1024]], "rounds": 9, "to": "found.json"}' > asked.json
    python -m launcher -n 2 -m benchmarks.collectives_worker asked.json

A turn is a barrier, one call that is not timed (it meets the caches as the implementation before left them), and a
window of calls, each timed on each rank. A turn's time is the median of a rank's calls, of the slowest rank. Where a
call does not need its peers (raw mpi4py's broadcast, scatter and gather of short messages) ranks run ahead of each
other, so that this is the time between two calls in a row rather than the time until all have the result; `"apart":
true` puts a barrier before every call instead.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from benchmarks.implementations import SHAPES, TO_AND_FRO, Array, Call, Make, Wire, expected, gloo, ours, raw, wire

WINDOW = 10e-3  # s a turn, if three calls do not take longer
MOST = 200  # calls a turn
SLOW = 0.1  # s; one timed call of this length is a turn
CHECKED = 120  # the first calls of a communicator may be compared between ranks; what is timed comes after them
TILE = 1 << 15  # floats; three tiles are at home in the second-level cache


@dataclass(frozen=True)
class Libraries:
    """What the implementations are called on; None has no turn: gloo without PyTorch, the wire of ranks on one host."""

    comm: Any
    mpi: Any
    dist: Any | None
    stream: Wire | None


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    options = {"check": asked["check"]} if asked.get("check") else {}
    comm = collectives.init("mpi", timeout=asked.get("timeout", 120.0), **options)
    from mpi4py import MPI

    address = asked.get("address", "127.0.0.1")
    stream = Wire(MPI, address) if asked.get("wire") else None
    libraries = Libraries(comm, MPI, start_gloo(MPI, address), stream)
    for _ in range(CHECKED):
        comm.barrier()
    found: dict[str, Any] = {"rows": [], "n": comm.size, "mpi": MPI.Get_library_version().split("\n")[0]}
    for name, nbytes in asked["rows"]:
        row = {"collective": name, "bytes": nbytes, "us": measure(name, nbytes, libraries, asked)}
        found["rows"].append(row)
        if comm.rank == 0 and asked.get("verbose"):
            print(f"{name} {nbytes}", file=sys.stderr, flush=True)
    if asked.get("bandwidth"):
        found["bandwidth"] = bandwidth(asked["bandwidth"], asked["rounds"], MPI)
    if comm.rank == 0:
        Path(asked["to"]).write_text(json.dumps(found))
    if libraries.dist is not None:
        libraries.dist.destroy_process_group()


def start_gloo(MPI: Any, address: str) -> Any | None:
    """torch.distributed among the same ranks, on a port that the system chose; None if PyTorch is not installed."""
    try:
        import torch.distributed as dist
    except ImportError:
        return None
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    limit = datetime.timedelta(seconds=120)
    store = None
    if rank == 0:
        store = dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False, timeout=limit)
    port = MPI.COMM_WORLD.bcast(store.port if store else None)
    store = store or dist.TCPStore(address, port, size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return dist


def measure(name: str, nbytes: int, libraries: Libraries, asked: dict[str, Any]) -> dict[str, list[float]]:
    """Implementation → µs of a call, one number a round."""
    MPI = libraries.mpi
    calls = dict(implementations(name, nbytes, libraries))
    lengths = {key: window(call, MPI) for key, call in calls.items()}
    times: dict[str, list[float]] = {key: [] for key in calls}
    shared_by = 2 if name in TO_AND_FRO else 1
    for _ in range(asked["rounds"]):
        for key, call in calls.items():
            mine = turn(call, lengths[key], MPI, asked.get("apart", False))
            times[key].append(1e6 * MPI.COMM_WORLD.allreduce(mine, MPI.MAX) / shared_by)
    return times


def implementations(name: str, nbytes: int, libraries: Libraries) -> Iterator[tuple[str, Call]]:
    """The calls to be timed, each checked once. Their buffers hold zeros afterwards, which sums leave as they are."""
    comm, MPI, dist = libraries.comm, libraries.mpi, libraries.dist
    n = max(nbytes // 4 // comm.size, 1) * comm.size
    ordinary = buffers(name, n, comm, lambda k: np.zeros(k, np.float32))
    shared = buffers(name, n, comm, lambda k: comm.empty(k, np.float32)) if hasattr(comm, "empty") else None
    entered: list[tuple[str, Any, Make, tuple[Array, Array] | None]] = [
        ("ours", comm, ours(name, in_place=True), ordinary),
        ("comm.empty", comm, ours(name, in_place=True), shared),
        ("raw", MPI, raw(name, in_place=True), ordinary),
        ("gloo", dist, gloo(name), ordinary),
    ]
    if name == "all_reduce" and libraries.stream is not None:
        entered.append(("wire", libraries.stream, wire, ordinary))
    elif name == "all_reduce":
        entered += [
            ("ours, out", comm, ours(name), ordinary),
            ("comm.empty, out", comm, ours(name), shared),
            ("raw, out", MPI, raw(name), ordinary),
        ]
    lacks = name not in TO_AND_FRO and not hasattr(comm, name)
    for key, library, make, pair in entered:
        if library is None or pair is None or (library is comm and lacks) or (name == "barrier" and pair is shared):
            continue
        call = make(library, *pair)
        if key == "wire":
            yield key, call
            continue
        in_place = SHAPES[name].in_place or (name in ("all_reduce", "reduce") and key == "gloo")
        checked(name, key, call, *pair, in_place or (name == "all_reduce" and not key.endswith("out")), comm)
        yield key, call


def buffers(name: str, n: int, comm: Any, make: Callable[[int], Array]) -> tuple[Array, Array]:
    """x and y of n numbers, or of a rank's share of them, with memory behind every page."""
    shape = SHAPES[name]
    x, y = make(n // comm.size if shape.x_part else n), make(n // comm.size if shape.y_part else n)
    x[:], y[:] = 0, 0
    return x, y


def checked(name: str, key: str, call: Call, x: Array, y: Array, in_place: bool, comm: Any) -> None:
    """Raises: SystemExit if the implementation computes something else than the collective."""
    x[:], y[:] = comm.rank + 1, -1
    call()
    size = comm.size
    right = expected(name, comm.rank, size, len(x) * (size if SHAPES[name].x_part else 1))
    got = x if in_place else y
    if right is not None and not np.array_equal(got, right):
        raise SystemExit(f"{key}: {name} gave {got[:4]} … on rank {comm.rank} of {size}, not {right[:4]} …")
    x[:], y[:] = 0, 0


def window(call: Call, MPI: Any) -> int:
    """How many calls a turn has: the same on every rank."""
    slowest = MPI.COMM_WORLD.allreduce(turn(call, 1, MPI, False), MPI.MAX)
    if slowest > SLOW:
        return 1
    slowest = MPI.COMM_WORLD.allreduce(turn(call, 5, MPI, False), MPI.MAX)
    return min(MOST, max(3, int(WINDOW / max(slowest, 1e-7))))


def turn(call: Call, calls: int, MPI: Any, apart: bool) -> float:
    """The median of this rank's calls, in seconds."""
    barrier, clock = MPI.COMM_WORLD.Barrier, time.perf_counter
    barrier()
    call()
    times = []
    for _ in range(calls):
        if apart:
            barrier()
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


def bandwidth(nbytes: int, rounds: int, MPI: Any) -> dict[str, list[float]]:
    """Kernel → bytes per second of all ranks at once, one number a round, on arrays of `nbytes` each.

    Counted as STREAM counts: what the kernel names is read and written, nothing else. They go tile by tile, as our own
    reductions do; the arrays are private, with whatever pages the system thinks best.
    """
    a, b, c = (np.zeros(nbytes // 4, np.float32) for _ in range(3))
    for each in (a, b, c):
        each[:] = 0  # memory behind every page
    kernels: dict[str, tuple[int, Callable[[slice], Any]]] = {
        "c = a": (2, lambda s: np.copyto(c[s], a[s])),
        "c = a + b": (3, lambda s: np.add(a[s], b[s], out=c[s])),
        "a = a + b": (3, lambda s: np.add(a[s], b[s], out=a[s])),
    }
    tiles = [slice(at, at + TILE) for at in range(0, len(a), TILE)]
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(rounds):
        for name, (counted, kernel) in kernels.items():

            def sweep(kernel: Callable[[slice], Any] = kernel) -> None:
                for tile in tiles:
                    kernel(tile)

            slowest = MPI.COMM_WORLD.allreduce(turn(sweep, 3, MPI, True), MPI.MAX)
            found[name].append(counted * a.nbytes * MPI.COMM_WORLD.size / slowest)
    return found


if __name__ == "__main__":
    main()
