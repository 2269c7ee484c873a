"""What a flight record says: the calls and the position of a process, and these in words, for errors and tables."""

from __future__ import annotations

import time
from typing import NamedTuple

from collectives.errors import RecordError
from collectives.flight.reader import FlightReader, format_call, format_site, state_of


class RecordedCall(NamedTuple):
    """One call of a process. Times are of the monotonic clock, in ns; 0: not yet.

    order: counts all calls of the process from 1; number: those of its communicator, from 0
    communicator: its key
    state: "queued", "started", "done" or "failed"
    name, dtype, shape, more: all_reduce, float32, (512, 10), sum, as text
    file, line: of the user's code
    """

    order: int
    communicator: str
    number: int
    state: str
    queued: int
    started: int
    ended: int
    name: str
    dtype: str
    shape: str
    more: str
    file: str
    line: int

    def __str__(self) -> str:
        return format_call(self.name, self.number, self.file, self.line, self.more, self.dtype, self.shape)

    @property
    def site(self) -> str:
        """`train.py:88`"""
        return format_site(self.file, self.line)


class Position(NamedTuple):
    """Where the main thread's Python code stood.

    time: of the sample; monotonic clock, ns
    file, line, function: the innermost frame of the user's code
    within: file, line and function of the innermost frame of all, if that one is a library's or ours
    """

    time: int
    file: str
    line: int
    function: str
    within: tuple[str, int, str] | None

    def __str__(self) -> str:
        text = f"{format_site(self.file, self.line)} in {self.function}"
        if self.within is not None:
            file, line, function = self.within
            text += f", within {format_site(file, line)} in {function}"
        return text


class FlightRecord(NamedTuple):
    """What a process did last.

    rank, size: -1 while the process does not know them
    clock: wall clock minus monotonic clock when the record was made, ns
    calls: the last ones, in the order in which they began; those being written at this moment are missing
    position: the last sample, None if none was taken
    step: that it has finished, by the program's own count or else that of `ddp.DataParallel`; None if neither counts
    """

    pid: int
    rank: int
    size: int
    clock: int
    calls: list[RecordedCall]
    position: Position | None
    step: int | None = None


def read(source: int | FlightReader) -> FlightRecord:
    """What a process has done so far, read from outside. source: its pid, or a reader of its record

    Raises: RecordError if there is no such process, it keeps no record, or we may not read it.
    """
    if isinstance(source, int):
        with FlightReader.of(source) as reader:
            return read(reader)
    pid, rank, size, clock, step = source.header()
    calls = [RecordedCall(*call) for call in source.calls()]
    sample = source.position()
    position = None if sample is None else Position(sample[0], *sample[1], sample[2])
    return FlightRecord(pid, rank, size, clock, calls, position, step)


def describe_process(pid: int) -> str:
    """What another process did last and where its Python stands, in words; else why that is not known."""
    try:
        record = read(pid)
    except RecordError as error:
        return str(error)
    stopped = "stopped by a signal or a debugger; " if state_of(pid) in ("T", "t") else ""
    return stopped + describe_last(record, time.monotonic_ns())


def describe_last(record: FlightRecord, now: int) -> str:
    """What a process did last, in words.

    now: of the monotonic clock, ns

    `last call all_reduce #417 (train.py:88) sum float32 (512, 10), done 31.2 s ago; step 208; its Python stood at
    data.py:31 in load (0.4 s before)`
    """
    text = "no call yet"
    if record.calls:
        call = record.calls[-1]
        queued = 0
        if call.state == "queued":  # what it waits for tells more
            under_way = [each for each in record.calls if each.state == "started"]
            if under_way:
                call = under_way[-1]
                queued = sum(each.state == "queued" for each in record.calls)
        text = f"last call {call}, {_doing(call, now)}" + (f", {queued} more queued" if queued else "")
    if record.step is not None:
        text += f"; step {record.step}"
    if record.position is not None:
        text += f"; its Python stood at {record.position} ({_ago(record.position.time, now)} before)"
    return text


def _doing(call: RecordedCall, now: int) -> str:
    if call.state == "queued":
        return f"queued for {_ago(call.queued, now)}"
    if call.state == "started":
        return f"under way for {_ago(call.started, now)}"
    return f"{call.state} {_ago(call.ended, now)} ago"


def _ago(then: int, now: int) -> str:
    return f"{max(0, now - then) / 1e9:.1f} s"


_HEADINGS = ("rank", "pid", "call", "", "dtype", "shape", "where", "communicator", "state", "begun", "took")


def table(records: list[FlightRecord], now: int, last: int = 10) -> str:
    """The last calls of several ranks, and where their Python stands, as aligned text.

    now: of the monotonic clock, ns; last: calls of each rank
    """
    rows: list[tuple[str, ...]] = [_HEADINGS]
    notes = []
    for record in sorted(records, key=lambda record: (record.rank, record.pid)):
        rank = str(record.rank) if record.rank >= 0 else "?"
        rows += [_row(rank, record.pid, call, now) for call in record.calls[-last:]]
        notes.append(f"rank {rank} (pid {record.pid}): {describe_last(record, now)}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] if len(rows) > 1 else []
    return "\n".join([*lines, *([""] if lines else []), *notes])


def _row(rank: str, pid: int, call: RecordedCall, now: int) -> tuple[str, ...]:
    begun = f"{_ago(call.queued, now)} ago"
    took = _duration(call.ended - call.started) if call.ended and call.started else ""
    named = f"{call.name} #{call.number}"
    state = call.state
    return (rank, str(pid), named, call.more, call.dtype, call.shape, call.site, call.communicator, state, begun, took)


def _duration(nanoseconds: int) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"
