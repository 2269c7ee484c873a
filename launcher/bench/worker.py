"""One rank of a job that `ddp-bench` has started: measures each collective, dtype and size in the same order as all
others; rank 0 prints, and writes the outcome to a file.

A batch is some calls in a row after a barrier; its time is that of the slowest rank, divided by the calls. The
implementations' batches alternate, so that noise of the machine hits all alike. Times are medians over rounds.
"""

from __future__ import annotations

import gc
import math
import pickle
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from collectives import BackendError, Communicator, init, run_threads, world
from launcher.bench import report
from launcher.bench.collective_table import KINDS, PLACES, ROOT, Kind, Place, algbw, carve
from launcher.bench.expected import dtype_of, poison, result, source, wrong
from launcher.bench.implementations import (
    CommSync,
    Gloo,
    Implementation,
    MPISync,
    Ours,
    OursOnDevice,
    OursShared,
    RawMPI,
    Sync,
)
from launcher.bench.report import Cell, Fitted, Outcome, Row
from launcher.bench.settings import DTYPES, Settings
from launcher.errors import UsageError

# Enough rounds for a median, few enough that a batch of a fast call is long against the barrier's skew.
_ROUNDS = 20
_LEAST_ROUNDS = 5
_MOST_CALLS = 100_000
_DAY = 86_400.0  # s; the time limit of a whole run between threads


def main(argv: Sequence[str]) -> None:
    """argv: settings, backend, number of ranks, and the path that rank 0 writes its outcome to, or a `UsageError`."""
    # A baseline's call may block where Python cannot be interrupted; nothing is lost with a rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    text, backend, ranks, path = argv
    outcome: Outcome | UsageError
    try:
        outcome = join(Settings.decode(text), backend, int(ranks))
    except UsageError as error:
        outcome = error
    ranks_world = world.promised()
    if ranks_world is None or ranks_world.rank == 0:
        with open(path, "wb") as file:
            pickle.dump(outcome, file)


def join(settings: Settings, backend: str, ranks: int) -> Outcome:
    """Measures with the other ranks, or with `ranks` threads; what was found.

    Raises: UsageError, on every rank, if the backend or an implementation is not to be had.
    """
    if backend == "threads":
        return run_threads(lambda comm: run(comm, settings), ranks, timeout=_DAY)[0]
    try:
        comm = init(backend)
    except BackendError as error:
        raise UsageError(str(error)) from None
    return run(comm, settings)


# -- timing


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is timed. settle: waits until calls that returned early have ended (on a GPU)."""

    call: Callable[[], Any]
    settle: Callable[[], None]
    trips: int = 1


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one entry took.

    rounds: seconds of one call on the slowest rank, for each round; seconds: their median; calls: measured in all
    """

    seconds: float
    rounds: tuple[float, ...]
    calls: int


def plan(estimates: Sequence[float], budget: float, iters: int | None) -> tuple[int, list[int]]:
    """Number of rounds, and each entry's calls a round, for calls that take about `estimates` seconds.

    budget: seconds for each entry; iters: calls of each entry, whatever they take
    """
    if iters is not None:
        rounds = min(iters, _ROUNDS)
        return rounds, [math.ceil(iters / rounds)] * len(estimates)
    calls = [min(_MOST_CALLS, max(1.0, budget / estimate)) for estimate in estimates]
    rounds = int(min(_ROUNDS, max(_LEAST_ROUNDS, min(calls))))
    return rounds, [max(1, int(each / rounds)) for each in calls]


def measure(entries: Sequence[Entry], sync: Sync, *, warmup: int, budget: float, iters: int | None) -> list[Timing]:
    """Times all entries. Collective: every rank brings the same entries in the same order."""
    estimates = []
    for entry in entries:
        _batch(entry, 1)  # the first call touches memory and makes connections
        sync.barrier()
        estimates.append(_batch(entry, warmup))
    # All ranks must make the same calls: the slowest's estimate is everybody's.
    agreed = sync.slowest(np.array(estimates))
    rounds, calls = plan([max(float(each), 1e-8) for each in agreed], budget, iters)
    seconds = np.zeros((rounds, len(entries)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for position in range(len(entries)):
                which = (turn + position) % len(entries)  # none always follows the same one
                sync.barrier()
                seconds[turn, which] = _batch(entries[which], calls[which])
    finally:
        if collecting:
            gc.enable()
    slow = sync.slowest(seconds)
    found = []
    for which, entry in enumerate(entries):
        times = [float(each) / entry.trips for each in slow[:, which]]
        found.append(Timing(seconds=statistics.median(times), rounds=tuple(times), calls=rounds * calls[which]))
    return found


def ratio(other: Timing, ours: Timing) -> float:
    """How many times as long the other one takes: the median over rounds, of which each saw the same machine."""
    return statistics.median(theirs / mine for theirs, mine in zip(other.rounds, ours.rounds, strict=True))


def _batch(entry: Entry, calls: int) -> float:
    call = entry.call
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    entry.settle()
    return (time.perf_counter() - start) / calls


# -- one job


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """An implementation and its two buffers."""

    who: Implementation
    first: Any
    second: Any


def run(comm: Communicator, settings: Settings) -> Outcome:
    """Measures all that `settings` asks for on the ranks of `comm`, and prints tables on rank 0. Collective.

    Raises: UsageError on every rank if an implementation is not to be had.
    """
    bench = _Bench(comm, settings)
    try:
        for name in settings.collectives:
            for dtype in settings.dtype:
                bench.table(KINDS[name], dtype)
            bench.finish(KINDS[name])
        return bench.outcome()
    finally:
        bench.close()


class _Bench:
    """One job: its implementations, and what has been found so far."""

    def __init__(self, comm: Communicator, settings: Settings) -> None:
        self.comm = comm
        self.settings = settings
        self.sync, implementations = _implementations(comm, settings)
        # The largest element times the ranks, where the largest size is smaller than that.
        nbytes = max(settings.maxbytes, comm.size * max(DTYPES[name] for name in settings.dtype))
        self.measured = [
            _Measured(who=who, first=who.empty(nbytes), second=who.empty(nbytes)) for who in implementations
        ]
        self.several = len(self.measured) > 1
        self.nodes = int(comm.all_reduce(np.array([comm.node], np.int64), "max")[0]) + 1
        self.rows: list[Row] = []
        self.fits: list[Fitted] = []
        self.unsupported: dict[tuple[str, str, str, Place], str] = {}

    def table(self, kind: Kind, dtype_name: str) -> None:
        """Measures one collective for one dtype."""
        sizes = self.settings.sizes()
        if self.comm.size < kind.least_ranks:
            return
        if dtype_name == self.settings.dtype[0]:
            where = report.place_text(self.comm.backend, self.comm.size, self.nodes)
            self._print(report.opening(kind, self.comm.size, where, self.several))
            self._print(report.heading(self.several))
        elif kind.empty:
            return  # nothing of it has a dtype
        counts = [kind.count(size, self.comm.size, DTYPES[dtype_name]) for size in sizes]
        for count in dict.fromkeys(counts):
            for row in self._rows(kind, dtype_name, count):
                self.rows.append(row)
                self._print([report.row_line(row, self.several)])

    def finish(self, kind: Kind) -> None:
        """What is known of a collective when its last row is there."""
        if self.comm.size < kind.least_ranks:
            self._print([f"# {kind.name}: needs at least {kind.least_ranks} ranks", ""])
        rows = [row for row in self.rows if row.collective == kind.name]
        fits = []
        for by, dtype in dict.fromkeys((row.by, row.dtype) for row in rows):
            for place in PLACES:
                mine = [row for row in rows if (row.by, row.dtype) == (by, dtype) and place in row.cells]
                line = report.fit([row.size for row in mine], [row.cells[place].seconds for row in mine])
                if line is not None:
                    fits.append(Fitted(collective=kind.name, by=by, dtype=dtype, place=place, line=line))
        self.fits += fits
        refused = [f"# {text}" for (name, *_), text in self.unsupported.items() if name == kind.name]
        if rows:
            self._print([*report.fit_lines(fits), *report.closing(rows), *refused, ""])

    def outcome(self) -> Outcome:
        """Everything."""
        return Outcome(
            backend=self.comm.backend,
            ranks=self.comm.size,
            nodes=self.nodes,
            versions=report.versions(),
            rows=tuple(self.rows),
            fits=tuple(self.fits),
            unsupported=tuple(self.unsupported.values()),
        )

    def _print(self, lines: list[str]) -> None:
        if self.comm.rank == 0 and lines:
            print("\n".join(lines), flush=True)

    def close(self) -> None:
        """Ends all implementations."""
        for each in self.measured:
            each.who.close()

    def _rows(self, kind: Kind, dtype_name: str, count: int) -> list[Row]:
        """One size: a row for each implementation that can do it."""
        dtype = dtype_of(dtype_name)
        places: tuple[Place, ...] = kind.places
        if self.settings.place != "both" and len(places) == 2:
            places = ("out",) if self.settings.place == "out" else ("in",)
        entries: dict[tuple[int, Place], Entry] = {}
        errors: dict[tuple[int, Place], int | None] = {}
        for number, each in enumerate(self.measured):
            for place in places:
                if (kind.name, dtype_name, each.who.name, place) in self.unsupported:
                    continue
                found = self._try(kind, place, each, dtype, count, dtype_name)
                if found is not None:
                    entries[number, place], errors[number, place] = found
            elements = count * self.comm.size
            for buffer in (each.first, each.second):
                # Zeros stay what they are however often they are reduced in place.
                part = buffer[: elements * dtype.itemsize].view(dtype)
                each.who.write(part, np.zeros(1, dtype))
        if not entries:
            return []
        budget, iters, warmup = self.settings.budget, self.settings.iters, self.settings.warmup
        timings = measure([*entries.values()], self.sync, warmup=warmup, budget=budget, iters=iters)
        timed = dict(zip(entries, timings, strict=True))
        size = kind.size(count, self.comm.size, dtype.itemsize)
        rows = []
        for number, each in enumerate(self.measured):
            cells = {
                place: self._cell(kind, size, timing, errors[which, place], timed.get((0, place)) if which else None)
                for (which, place), timing in timed.items()
                if which == number
            }
            if cells:
                op, root = self.settings.op if kind.reduces else "none", ROOT if kind.rooted else -1
                rows.append(
                    Row(
                        collective=kind.name,
                        by=each.who.name,
                        size=size,
                        count=count,
                        dtype="none" if kind.empty else dtype_name,
                        op=op,
                        root=root,
                        cells=cells,
                    )
                )
        return rows

    def _cell(self, kind: Kind, size: int, timing: Timing, errors: int | None, ours: Timing | None) -> Cell:
        bandwidth = algbw(size, timing.seconds)
        return Cell(
            seconds=timing.seconds,
            algbw=bandwidth,
            busbw=bandwidth * kind.factor(self.comm.size),
            calls=timing.calls,
            rounds=timing.rounds,
            wrong=errors,
            ratio=None if ours is None else ratio(timing, ours),
        )

    def _try(
        self, kind: Kind, place: Place, each: _Measured, dtype: np.dtype[Any], count: int, dtype_name: str
    ) -> tuple[Entry, int | None] | None:
        """A call that has worked once, and how many elements were wrong then; None if the implementation refuses it."""
        rank, size, op, who = self.comm.rank, self.comm.size, self.settings.op, each.who
        nbytes = count * size * dtype.itemsize
        buffers = [each[:nbytes].view(dtype) for each in (each.first, each.second)]
        x, out = carve(kind, place, buffers[0], buffers[1], rank, size, count)
        check = self.settings.check and x is not None
        if check:
            for each in buffers:
                who.write(each, np.full(1, poison(dtype)))
            if kind.out is not None or rank == ROOT:
                who.write(x, source(kind, rank, 0, len(x), dtype, op))
        reason = ""
        try:
            call = who.bind(kind, x, out, op)
            call()
            who.settle()
        except who.unsupported as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
        if self.sync.total(bool(reason)):
            where = PLACES[place]
            self.unsupported[kind.name, dtype_name, who.name, place] = (
                f"{who.name} has no {kind.name} of {dtype_name} {where}: {reason or 'another rank says so'}"
            )
            return None
        errors = None
        if check:
            must = result(kind, rank, size, count, dtype, op)
            errors = 0 if must is None else wrong(who.read(x if out is None else out), must, op)
            errors = self.sync.total(errors)
        return Entry(call=call, settle=who.settle, trips=kind.trips), errors


def _implementations(comm: Communicator, settings: Settings) -> tuple[Sync, Sequence[Implementation]]:
    if comm.backend == "nccl":
        return MPISync(), [OursOnDevice(comm)]  # baselines, and shared memory, have host arrays
    ours: list[Implementation] = [Ours(comm)]
    if settings.empty:
        ours.append(OursShared(comm))
    if comm.backend == "threads" or (comm.size == 1 and not settings.vs):
        return CommSync(comm), ours
    sync = MPISync()
    one_node = comm.local_size == comm.size
    for name in settings.vs:
        ours.append(RawMPI(sync) if name == "mpi4py" else Gloo(sync, comm.rank, comm.size, one_node))
    return sync, ours


if __name__ == "__main__":
    main(sys.argv[1:])
