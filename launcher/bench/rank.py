"""What every rank does: measures each collective, dtype and size in the same order as all the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives import Communicator
from launcher.bench.contestants import Contestant, Ours, OursShared
from launcher.bench.expected import Array, dtype_of, poison, result, source, wrong
from launcher.bench.fit import fit
from launcher.bench.kinds import KINDS, PLACES, ROOT, Kind, Place, algbw, carve
from launcher.bench.record import Outcome, versions
from launcher.bench.screen import Screen
from launcher.bench.settings import DTYPES, Settings
from launcher.bench.table import Cell, Fitted, Row, closing, fit_lines, heading, opening, place_text, row_line
from launcher.bench.timing import Entry, Meeting, Timing, measure, ratio


class CommMeeting:
    """Ranks that are threads, or one alone, meet by the communicator itself."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def sync(self) -> None:
        self._comm.barrier()

    def slowest(self, seconds: Array) -> Array:
        worst: Array = self._comm.all_reduce(seconds, "max")
        return worst

    def total(self, number: int) -> int:
        return int(self._comm.all_reduce(np.array([number], np.int64))[0])


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """A contestant and its two buffers."""

    who: Contestant
    first: Any
    second: Any


def run(comm: Communicator, settings: Settings, *, bar: bool) -> Outcome:
    """Measures all that `settings` asks for on the ranks of `comm`, and prints tables on rank 0. Collective.

    Raises: UsageError on every rank if a contestant is not to be had.
    """
    bench = _Bench(comm, settings, bar)
    try:
        for name in settings.collectives:
            for dtype in settings.dtype:
                bench.table(KINDS[name], dtype)
            bench.finish(KINDS[name])
        return bench.outcome()
    finally:
        bench.close()


class _Bench:
    """One job: its contestants, and what has been found so far."""

    def __init__(self, comm: Communicator, settings: Settings, bar: bool) -> None:
        self.comm = comm
        self.settings = settings
        steps = len(settings.collectives) * len(settings.dtype) * len(settings.sizes())
        self.screen = Screen(shown=comm.rank == 0, bar=bar, steps=steps)
        self.meeting, contestants = _contestants(comm, settings)
        # The largest element times the ranks, where the largest size is smaller than that.
        nbytes = max(settings.maxbytes, comm.size * max(DTYPES[name] for name in settings.dtype))
        self.seats = [_Seat(who=who, first=who.empty(nbytes), second=who.empty(nbytes)) for who in contestants]
        self.several = len(self.seats) > 1
        self.nodes = int(comm.all_reduce(np.array([comm.node], np.int64), "max")[0]) + 1
        self.rows: list[Row] = []
        self.fits: list[Fitted] = []
        self.refusals: dict[tuple[str, str, str, Place], str] = {}

    def table(self, kind: Kind, dtype_name: str) -> None:
        """Measures one collective for one dtype."""
        sizes = self.settings.sizes()
        if self.comm.size < kind.least_ranks:
            return
        if dtype_name == self.settings.dtype[0]:
            where = place_text(self.comm.backend, self.comm.size, self.nodes)
            self.screen.lines([*opening(kind, self.comm.size, where, self.several), *heading(self.several)])
        elif kind.empty:
            return  # nothing of it has a dtype
        counts = [kind.count(size, self.comm.size, DTYPES[dtype_name]) for size in sizes]
        for count in dict.fromkeys(counts):
            self.screen.doing(f"{kind.name} {kind.size(count, self.comm.size, DTYPES[dtype_name])} B")
            for row in self._rows(kind, dtype_name, count):
                self.rows.append(row)
                self.screen.lines([row_line(row, self.several)])
            for _ in range(counts.count(count)):
                self.screen.step()

    def finish(self, kind: Kind) -> None:
        """What is known of a collective when its last row is there."""
        if self.comm.size < kind.least_ranks:
            self.screen.lines([f"# {kind.name}: needs at least {kind.least_ranks} ranks", ""])
        rows = [row for row in self.rows if row.collective == kind.name]
        fits = []
        for by, dtype in dict.fromkeys((row.by, row.dtype) for row in rows):
            for place in PLACES:
                mine = [row for row in rows if (row.by, row.dtype) == (by, dtype) and place in row.cells]
                line = fit([row.size for row in mine], [row.cells[place].seconds for row in mine])
                if line is not None:
                    fits.append(Fitted(collective=kind.name, by=by, dtype=dtype, place=place, line=line))
        self.fits += fits
        refused = [f"# {text}" for (name, *_), text in self.refusals.items() if name == kind.name]
        if rows:
            self.screen.lines([*fit_lines(fits), *closing(rows), *refused, ""])

    def outcome(self) -> Outcome:
        """Everything."""
        return Outcome(
            backend=self.comm.backend,
            ranks=self.comm.size,
            nodes=self.nodes,
            versions=versions(),
            rows=tuple(self.rows),
            fits=tuple(self.fits),
            refusals=tuple(self.refusals.values()),
        )

    def close(self) -> None:
        """The end of all contestants."""
        self.screen.close()
        for seat in self.seats:
            seat.who.close()

    def _rows(self, kind: Kind, dtype_name: str, count: int) -> list[Row]:
        """One size: a row for each contestant that can do it."""
        dtype = dtype_of(dtype_name)
        places: tuple[Place, ...] = kind.places
        if self.settings.place != "both" and len(places) == 2:
            places = ("out",) if self.settings.place == "out" else ("in",)
        entries: dict[tuple[int, Place], Entry] = {}
        errors: dict[tuple[int, Place], int | None] = {}
        for number, seat in enumerate(self.seats):
            for place in places:
                if (kind.name, dtype_name, seat.who.name, place) in self.refusals:
                    continue
                found = self._try(kind, place, seat, dtype, count, dtype_name)
                if found is not None:
                    entries[number, place], errors[number, place] = found
            elements = count * self.comm.size
            for buffer in (seat.first, seat.second):
                # Zeros stay what they are however often they are reduced in place.
                part = buffer[: elements * dtype.itemsize].view(dtype)
                seat.who.write(part, np.zeros(1, dtype))
        if not entries:
            return []
        budget, iters, warmup = self.settings.budget, self.settings.iters, self.settings.warmup
        timings = measure([*entries.values()], self.meeting, warmup=warmup, budget=budget, iters=iters)
        timed = dict(zip(entries, timings, strict=True))
        size = kind.size(count, self.comm.size, dtype.itemsize)
        rows = []
        for number, seat in enumerate(self.seats):
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
                        by=seat.who.name,
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
        self, kind: Kind, place: Place, seat: _Seat, dtype: np.dtype[Any], count: int, dtype_name: str
    ) -> tuple[Entry, int | None] | None:
        """A call that has worked once, and how many elements were wrong then; None if the contestant refuses it."""
        rank, size, op, who = self.comm.rank, self.comm.size, self.settings.op, seat.who
        nbytes = count * size * dtype.itemsize
        buffers = [each[:nbytes].view(dtype) for each in (seat.first, seat.second)]
        x, out = carve(kind, place, buffers[0], buffers[1], rank, size, count)
        looked = self.settings.check and x is not None
        if looked:
            for each in buffers:
                who.write(each, np.full(1, poison(dtype)))
            if kind.out is not None or rank == ROOT:
                who.write(x, source(kind, rank, 0, len(x), dtype, op))
        refusal = ""
        try:
            call = who.bind(kind, x, out, op)
            call()
            who.settle()
        except who.refusals as error:
            refusal = (str(error) or type(error).__name__).splitlines()[0]
        if self.meeting.total(bool(refusal)):
            where = PLACES[place]
            self.refusals[kind.name, dtype_name, who.name, place] = (
                f"{who.name} has no {kind.name} of {dtype_name} {where}: {refusal or 'another rank says so'}"
            )
            return None
        errors = None
        if looked:
            must = result(kind, rank, size, count, dtype, op)
            errors = 0 if must is None else wrong(who.read(x if out is None else out), must, op)
            errors = self.meeting.total(errors)
        return Entry(call=call, settle=who.settle, trips=kind.trips), errors


def _contestants(comm: Communicator, settings: Settings) -> tuple[Meeting, Sequence[Contestant]]:
    if comm.backend == "nccl":
        from launcher.bench.device import OursOnDevice
        from launcher.bench.raw_mpi import MPIMeeting

        return MPIMeeting(), [OursOnDevice(comm)]  # rivals, and shared memory, have host arrays
    ours: list[Contestant] = [Ours(comm)]
    if settings.empty:
        ours.append(OursShared(comm))
    if comm.backend == "threads" or (comm.size == 1 and not settings.vs):
        return CommMeeting(comm), ours
    from launcher.bench.raw_mpi import MPIMeeting, RawMPI  # here, so that a world of one never loads MPI

    meeting = MPIMeeting()
    for rival in settings.vs:
        if rival == "mpi4py":
            ours.append(RawMPI(meeting))
        else:
            from launcher.bench.gloo import Gloo

            ours.append(Gloo(meeting, comm.rank, comm.size, comm.local_size == comm.size))
    return meeting, ours
