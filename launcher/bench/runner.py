"""One rank of `ddp-bench`: measures collectives, dtypes and sizes, in the same order on all ranks; rank 0 prints.

A batch is some calls in a row after a barrier; its time is that of the slowest rank, divided by the number of calls.
The implementations' batches alternate, so that noise of the machine hits all alike. Times are medians over rounds.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from collectives import BackendError, Communicator, init, run_threads
from collectives.progress_bar import progress_bar
from launcher.bench import report
from launcher.bench.collective_table import COLLECTIVES, ROOT, Collective, ResultPlace, carve
from launcher.bench.expected import Array, dtype_of, poison, result, source, wrong
from launcher.bench.implementations import Implementation, find
from launcher.bench.report import Outcome, Row
from launcher.bench.settings import Settings
from launcher.errors import UsageError

# Maximum number of rounds. With more, a batch of a fast call would be so short that the ranks' different delays after
# the barrier would falsify its time.
_ROUNDS = 20
# Minimum number of rounds, enough for a median. A small `iters` makes fewer.
_MIN_ROUNDS = 5
# Maximum number of measured calls of an entry, unless `iters` sets their number.
_MAX_CALLS = 100_000
# The time limit of a whole run between threads, in seconds: a day.
_DAY = 86_400.0

# Takes this rank's array, and returns the element-wise maximum over all ranks.
Slowest = Callable[[Array], Array]


def join(settings: Settings) -> Outcome:
    """Measures with the other ranks, or with threads of this process, and returns the results.

    Raises: UsageError if the backend is not available.
    """
    if settings.backend == "threads":
        return run_threads(lambda comm: run(comm, settings), settings.ranks or 2, timeout=_DAY)[0]
    try:
        comm = init(settings.backend)
    except BackendError as error:
        raise UsageError(str(error)) from None
    return run(comm, settings)


# -- timing


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A call to be timed.

    settle: waits for calls that returned early (on a GPU)
    trips: how many messages a call sends, one after the other; the reported time is that of one message
    """

    call: Callable[[], Any]
    settle: Callable[[], None]
    trips: int = 1


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of an entry. calls: how many, in all

    rounds: by round, the seconds of a call on the slowest rank, divided by `Entry.trips`
    """

    rounds: tuple[float, ...]
    calls: int


def plan(estimates: Sequence[float], budget: float, iters: int | None) -> tuple[int, list[int]]:
    """Number of rounds, and each entry's calls per round, for calls that take about `estimates` seconds.

    budget: seconds for each entry
    iters: calls of each entry, however long they take, rounded up to a multiple of the calls per round
    """
    if iters is not None:
        calls_per_round = math.ceil(iters / _ROUNDS)
        return math.ceil(iters / calls_per_round), [calls_per_round] * len(estimates)
    calls = [min(_MAX_CALLS, max(1.0, budget / estimate)) for estimate in estimates]
    rounds = int(min(_ROUNDS, max(_MIN_ROUNDS, min(calls))))
    return rounds, [max(1, int(number / rounds)) for number in calls]


def measure(
    entries: Sequence[Entry], barrier: Callable[[], object], slowest: Slowest, settings: Settings
) -> list[Timing]:
    """Times all entries. Collective: every rank brings the same entries in the same order."""
    estimates = []
    for entry in entries:
        _batch(entry, 1)  # the first call touches memory and makes connections
        barrier()
        estimates.append(_batch(entry, settings.warmup))
    # All ranks must make the same number of calls: the slowest rank's estimate counts.
    shared = [max(float(seconds), 1e-8) for seconds in slowest(np.array(estimates))]
    rounds, calls = plan(shared, settings.budget, settings.iters)
    seconds = np.zeros((rounds, len(entries)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for round_index in range(rounds):
            for position in range(len(entries)):
                index = (round_index + position) % len(entries)  # so that no entry is always the first
                barrier()
                seconds[round_index, index] = _batch(entries[index], calls[index]) / entries[index].trips
    finally:
        if collecting:
            gc.enable()
    times = slowest(seconds)
    return [Timing(rounds=tuple(times[:, i].tolist()), calls=rounds * calls[i]) for i in range(len(entries))]


def _batch(entry: Entry, calls: int) -> float:
    call = entry.call
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    entry.settle()
    return (time.perf_counter() - start) / calls


# -- one job


def run(comm: Communicator, settings: Settings) -> Outcome:
    """Measures all that `settings` names on the ranks of `comm`, and prints tables on rank 0. Collective."""
    job = _Job(comm, settings)
    try:
        with job.bar:
            for name in settings.collectives:
                job.measure(COLLECTIVES[name])
    finally:
        for library, *_ in job.measured:
            library.close()
    return Outcome(
        backend=comm.backend,
        ranks=comm.size,
        nodes=job.nodes,
        versions=report.versions(),
        rows=tuple(job.rows),
        unsupported=tuple(job.unsupported.values()),
    )


class _Job:
    """The implementations, each with its two buffers, and the results so far."""

    def __init__(self, comm: Communicator, settings: Settings) -> None:
        self.comm = comm
        self.settings = settings
        self.barrier, implementations = find(comm, settings)
        # Enough for one element of each rank, even if the largest size is smaller than that.
        nbytes = max(settings.maxbytes, comm.size * max(dtype_of(name).itemsize for name in settings.dtype))
        self.measured = [(library, library.empty(nbytes), library.empty(nbytes)) for library in implementations]
        self.nodes = int(comm.all_reduce(np.array([comm.node], np.int64), "max")[0]) + 1
        self.rows: list[Row] = []
        self.unsupported: dict[tuple[str, str, ResultPlace, str], str] = {}
        sizes = sum(len(self._sizes(COLLECTIVES[name])) for name in settings.collectives)
        # No bar in a log: the tables show the progress there.
        self.bar = progress_bar(total=sizes, unit="size", rank=comm.rank, log=False, leave=False)

    def _sizes(self, collective: Collective) -> list[tuple[str, int]]:
        """(dtype, elements a rank) of each measurement of a collective; [] if there are too few ranks."""
        ranks = self.comm.size
        if ranks < collective.least_ranks:
            return []
        dtypes = self.settings.dtype[: 1 if collective.empty else None]  # a barrier has no dtype
        sizes = self.settings.sizes()
        return list(
            dict.fromkeys((d, collective.count(size, ranks, dtype_of(d).itemsize)) for d in dtypes for size in sizes)
        )

    def measure(self, collective: Collective) -> None:
        """Measures one collective for all dtypes and sizes."""
        if not (sizes := self._sizes(collective)):
            self._print(f"# {collective.name}: needs at least {collective.least_ranks} ranks", "")
            return
        self._print(*report.heading(collective, self.comm.size, self.nodes, self.comm.backend))
        first = len(self.rows)
        self.bar.set_description(collective.name)
        for dtype, count in sizes:
            rows = self._rows(collective, dtype, count)
            self._print(*map(report.line, rows))
            self.rows += rows
            self.bar.update()
        if self.settings.check:
            self._print(f"# wrong elements: {sum(row.wrong or 0 for row in self.rows[first:])}")
        self._print(*(f"# {text}" for (name, *_), text in self.unsupported.items() if name == collective.name), "")

    def _print(self, *lines: str) -> None:
        if self.comm.rank == 0 and lines:
            with self.bar.external_write_mode():
                print("\n".join(lines), flush=True)

    def _rows(self, collective: Collective, dtype_name: str, count: int) -> list[Row]:
        """Measures one size. Returns: a row for each implementation and place, where the call is supported"""
        dtype = dtype_of(dtype_name)
        places = [place for place in collective.places if self.settings.place in ("both", place)] or collective.places
        entries: dict[tuple[str, ResultPlace], Entry] = {}
        errors: dict[tuple[str, ResultPlace], int | None] = {}
        for library, *buffers in self.measured:
            parts = [buffer[: count * self.comm.size * dtype.itemsize].view(dtype) for buffer in buffers]
            for place in places:
                if (collective.name, dtype_name, place, library.name) not in self.unsupported:
                    call = self._try(collective, place, library, parts, dtype_name, count)
                    if call is not None:
                        entries[library.name, place] = Entry(
                            call=call[0], settle=library.settle, trips=collective.trips
                        )
                        errors[library.name, place] = call[1]
            for part in parts:
                library.write(part, np.zeros(1, dtype))  # zeros stay zeros however often they are reduced in place
        if not entries:
            return []
        timings = measure([*entries.values()], self.barrier, self._slowest, self.settings)
        timed = dict(zip(entries, timings, strict=True))
        size = collective.size(count, self.comm.size, dtype.itemsize)
        ours = self.measured[0][0].name
        rows = []
        for (by, place), timing in timed.items():
            seconds = statistics.median(timing.rounds)
            algbw = size / seconds / 1e9
            reference = timed.get((ours, place)) if by != ours else None
            rows.append(
                Row(
                    collective=collective.name,
                    size=size,
                    count=count,
                    dtype="none" if collective.empty else dtype_name,
                    op=self.settings.op if collective.reduces else "none",
                    place=place,
                    by=by,
                    seconds=seconds,
                    algbw=algbw,
                    busbw=algbw * collective.factor(self.comm.size),
                    **vars(timing),
                    wrong=errors[by, place],
                    ratio=None if reference is None else report.median_ratio(timing.rounds, reference.rounds),
                )
            )
        return rows

    def _try(
        self,
        collective: Collective,
        place: ResultPlace,
        library: Implementation,
        buffers: Sequence[Any],
        dtype_name: str,
        count: int,
    ) -> tuple[Callable[[], Any], int | None] | None:
        """Binds a collective to the buffers, and calls it once.

        Returns: the call, and the number of wrong elements (None without a check); None if a rank does not support it
        """
        rank = self.comm.rank
        size = self.comm.size
        op = self.settings.op
        dtype = dtype_of(dtype_name)
        x, out = carve(collective, place, buffers[0], buffers[1], rank, size, count)
        check = self.settings.check and x is not None
        if check:
            for buffer in buffers:
                library.write(buffer, np.full(1, poison(dtype)))
            if collective.out is not None or rank == ROOT:
                library.write(x, source(collective, rank, 0, len(x), dtype, op))
        reason = ""
        try:
            call = library.bind(collective, x, out, op)
            call()
            library.settle()
        except library.unsupported as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
        if self._total(bool(reason)):
            refused = f"{library.name} has no {collective.name} of {dtype_name}, place {place}"
            text = f"{refused}: {reason or 'another rank failed'}"
            self.unsupported[collective.name, dtype_name, place, library.name] = text
            return None
        if not check:
            return call, None
        expected = result(collective, rank, size, count, dtype, op)
        errors = 0 if expected is None else wrong(library.read(x if out is None else out), expected, op)
        return call, self._total(errors)

    def _slowest(self, seconds: Array) -> Array:
        return self.comm.all_reduce(seconds, "max")

    def _total(self, number: int) -> int:
        return int(self.comm.all_reduce(np.array([number], np.int64))[0])
