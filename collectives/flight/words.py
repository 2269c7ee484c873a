"""Flight records as text, for time limits, hang reports and `ddp-doctor calls`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from collectives.errors import RecordError, align_columns
from collectives.flight.reader import FlightRecord, read, seconds, state_of


def describe_process(pid: int) -> str:
    """What another process did last and where its Python code is, as text; or why that is unknown."""
    try:
        record = read(pid)
    except RecordError as error:
        return str(error)
    stopped = "stopped by a signal or a debugger; " if state_of(pid) in ("T", "t") else ""
    return stopped + describe_last(record, time.monotonic_ns())


def on_communicator(label: str) -> str:
    """`" on world.1 (DataParallel of Net)"`; "" for the world, where most programs make all their calls."""
    return "" if label == "world" else f" on {label}"


def describe_last(record: FlightRecord, now: int) -> str:
    """What a process did last, as text.

    now: of the monotonic clock, ns

    `last call all_reduce #417 (train.py:88) sum float32 (512, 10), done 31.2 s ago; step 208; its Python stood at
    data.py:31 in load (0.4 s before)`
    """
    call, queued = record.current
    text = "no call yet"
    if call is not None:
        ago = f"{seconds(call.since, now):.1f} s"
        states = {"queued": f"queued for {ago}", "started": f"under way for {ago}"}
        state = states.get(call.state, f"{call.state} {ago} ago")
        text = f"last call {call}{on_communicator(call.communicator)}, {state}"
        if queued:
            text += f", {queued} more queued"
    if record.step is not None:
        text += f"; step {record.step}"
    if record.position is not None:
        text += f"; its Python stood at {record.position} ({seconds(record.position.time, now):.1f} s before)"
    return text


_HEADINGS = (
    "rank",
    "pid",
    "call",
    "",
    "dtype",
    "shape",
    "where",
    "communicator",
    "state",
    "begun",
    "took",
)


def table(records: Sequence[FlightRecord], now: int, last: int = 10) -> str:
    """The last calls of several ranks, and where their Python code is, as aligned text.

    now: of the monotonic clock, ns; last: number of calls shown for each rank
    """
    rows: list[tuple[str, ...]] = [_HEADINGS]
    positions = []
    for record in sorted(records, key=lambda record: (record.rank, record.pid)):
        rank = str(record.rank) if record.rank >= 0 else "?"
        for call in record.calls[-last:]:
            took = f"{(call.ended - call.started) / 1e6:.4g} ms" if call.ended and call.started else ""
            name = f"{call.name} #{call.number}"
            begun = f"{seconds(call.queued, now):.1f} s ago"
            array = (call.more, call.dtype, call.shape)
            rows.append((rank, str(record.pid), name, *array, call.site, call.communicator, call.state, begun, took))
        positions.append(f"rank {rank} (pid {record.pid}): {describe_last(record, now)}")
    if len(rows) == 1:
        return "\n".join(positions)
    return "\n".join([*align_columns(rows), "", *positions])
