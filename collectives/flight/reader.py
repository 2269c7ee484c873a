"""Reads the flight record of any process of the same user, at any moment, and shows records as text.

The process whose record is read takes no part. It may be stopped, compute with the GIL held, or write a million calls a
second. A call counts only if two readings of the ring agree on it. Its text is read between the two: as long as a call
is in the ring, its text is not overwritten.

Each rank's agent holds a reader and asks for the newest call every second, so this module imports almost nothing.
"""

from __future__ import annotations

import os
import time
from collections import namedtuple
from collections.abc import Callable, Sequence

from collectives.errors import RecordError, align_columns
from collectives.flight import layout
from collectives.flight.layout import CALLS, FIGURES, NOT_KNOWN, TEXTS_AT, unpack_text

# `TYPE_CHECKING` is not imported from `typing`: that import would cost an agent a tenth of its memory.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

_ATTEMPTS = 5
# Calls outside of the order of collectives. They are numbered separately, for each name.
_UNORDERED = ("send", "recv", "create_group")
_UNKNOWN = ["?", "?", "", "", "", "?", "0"]


class RecordedCall(
    namedtuple(
        "RecordedCall",
        "order communicator number state queued started ended name dtype shape more file line",
    )
):
    """One call of a process. Times are of the monotonic clock, in ns; 0: not yet.

    order: the call's number among all calls of the process, from 1
    number: the call's number among the collectives of its communicator, from 0. send, recv and create_group are counted
    apart, by name
    communicator: its key, and its purpose if it has one; state: "queued", "started", "done" or "failed"
    name, dtype, shape, more: texts, e.g. all_reduce, float32, (512, 10), sum; file, line: place in the user's code
    """

    __slots__ = ()

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.name} #{self.number} ({self.site})", self.more, self.dtype, self.shape)))

    @property
    def site(self) -> str:
        """The place of the call in the user's code: `train.py:88`."""
        return _site(self.file, self.line)

    @property
    def since(self) -> int:
        """When the call entered its present state."""
        return int({"queued": self.queued, "started": self.started}.get(self.state, self.ended))


class Position(namedtuple("Position", "time file line function within")):
    """Where the main thread's Python code was.

    time: when the sample was taken (ns of the monotonic clock)
    file, line, function: the innermost frame of the user's code; if there is none, the innermost frame of a library
    within: file, line and function of the innermost frame overall, if that is another frame; else None
    """

    __slots__ = ()

    def __str__(self) -> str:
        text = f"{_site(self.file, self.line)} in {self.function}"
        if self.within is not None:
            file, line, function = self.within
            text += f", within {_site(file, line)} in {function}"
        return text


class FlightRecord(namedtuple("FlightRecord", "pid rank size calls position step figures", defaults=(None, ()))):
    """What a process did last.

    rank, size: -1 while the process does not know them
    calls: the process's last calls, in the order in which they began, without those being written at this moment
    position: the last sample, None if there is none
    step: the number of the last finished step. The program counts steps, or else `ddp.DataParallel` does; None if
    neither does
    figures: the values of FIGURES, in that order
    """

    __slots__ = ()

    @property
    def current(self) -> tuple[RecordedCall | None, int]:
        """The call that the process is in, and how many calls are queued.

        This is the newest call in progress. If consecutive collectives of its communicator are in progress at once, it
        is the first of them, because they complete in order. If the last call has ended, or none is in progress: the
        last call and 0. Before any call: (None, 0).
        """
        if not self.calls:
            return None, 0
        current = self.calls[-1]
        in_progress = [call for call in self.calls if call.state == "started"]
        if current.state not in ("queued", "started") or not in_progress:
            return current, 0
        current = in_progress.pop()
        for call in reversed(in_progress if current.name not in _UNORDERED else []):
            before_current = (current.communicator, current.number - 1)
            if call.name not in _UNORDERED and (call.communicator, call.number) == before_current:
                current = call
        return current, sum(call.state == "queued" for call in self.calls)


class FlightReader:
    """One process's flight record: opened once, read many times, even after the process has died.

    peek: returns `length` bytes at `offset` of the record
    """

    def __init__(self, peek: Callable[[int, int], bytes], fd: int | None = None) -> None:
        self._peek = peek
        self._fd = fd
        self._texts: dict[int, list[str] | None] = {}  # By number; the text of a number never changes.

    @classmethod
    def of(cls, pid: int) -> Self:
        """Opens the record of a running process.

        Raises: RecordError if there is no such process, it has ended or belongs to another user, or has no record that
        can be read.
        """
        try:
            fds = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd") if _is_record(pid, int(fd))]
        except OSError as error:
            raise _explain(pid, error) from None
        for fd in fds:
            try:
                reader = cls.of_fd(pid, fd)
            except RecordError:
                if _is_record(pid, fd):
                    raise
                continue
            # If the pids differ, it is the record of the process's parent or, if the process is an agent, of its rank.
            if reader.record(with_calls=False).pid == _own_pid(pid):
                return reader
            reader.close()
        if state_of(pid) in ("Z", ""):
            raise RecordError(f"process {pid} has ended")
        raise RecordError(f"process {pid} keeps no flight record: it is no rank, or has not initialized collectives")

    @classmethod
    def of_fd(cls, pid: int, fd: int) -> Self:
        """Opens the record that process `pid` has open as `fd`.

        Raises: RecordError if it has none there, or the record cannot be read.
        """
        try:
            own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _explain(pid, error) from None
        # Read by pread and never mapped: if the file were truncated, an access to a mapping would end this process.
        reader = cls(lambda offset, length: os.pread(own_fd, length, offset), own_fd)
        try:
            reader.record(with_calls=False)
        except RecordError as error:
            reader.close()
            raise RecordError(f"process {pid}, file descriptor {fd}: {error}") from None
        return reader

    def close(self) -> None:
        """Closes the file; may be called again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def record(self, with_calls: bool = True) -> FlightRecord:
        """Reads the record. Raises: RecordError if it is not a flight record, is damaged, or of another version."""
        data = self._peek(0, layout.HEADER.size)
        if len(data) < layout.HEADER.size or not data.startswith(layout.MAGIC):
            raise RecordError("this is not a flight record, or it is only being made")
        _, version, size, pid, rank, world_size, step, backwards, *figures = layout.HEADER.unpack(data)
        if version != layout.VERSION:
            raise RecordError(f"a flight record of layout {version}, but this reader knows layout {layout.VERSION}")
        if size != layout.SIZE or not self._peek(layout.SIZE - 1, 1):
            raise RecordError("a damaged flight record: it has not the size that it should have")
        counted = step if step >= 0 else backwards
        calls = self._calls() if with_calls else []
        step = counted if counted >= 0 else None
        return FlightRecord(pid, rank, world_size, calls, self._position(), step, figures)

    def newest(self, now: int) -> dict[str, object]:
        """The newest state of the process, as a message. Raises: what `record` raises.

        now: the time by the monotonic clock (ns)
        step: the number of the last finished step; None if nothing counts steps
        calls: number of calls begun; call: text of `FlightRecord.current`; call_on: this call's communicator
        call_state: queued, started, done or failed; call_age: seconds in that state. None before any call
        where: line and function of its Python code; where_age: age of that sample in seconds. None without a sample
        one key for each figure of FIGURES that is known
        """
        record = self.record()
        call, _ = record.current
        position = record.position
        return {
            "step": record.step,
            "calls": record.calls[-1].order if record.calls else 0,
            "call": call and str(call),
            "call_on": call and call.communicator,
            "call_state": call and call.state,
            "call_age": call and seconds(call.since, now),
            "where": position and f"{_site(position.file, position.line)} in {position.function}",
            "where_age": position and seconds(position.time, now),
            **{name: figure for name, figure in zip(FIGURES, record.figures, strict=True) if figure != NOT_KNOWN},
        }

    def _position(self) -> Position | None:
        for _ in range(_ATTEMPTS):
            slot = unpack_text(self._peek(layout.POSITION_AT, layout.POSITION_SIZE), 6)
            if slot is not None:
                time, (file, line, function, in_file, in_line, in_function) = slot
                within = (in_file, int(in_line), in_function) if in_file else None
                return Position(time, file, int(line), function, within)
        return None

    def _calls(self) -> list[RecordedCall]:
        for _ in range(_ATTEMPTS):
            first = self._ring()
            known_texts = self._texts
            unknown = any(not known_texts.get(words[1]) for words in first)
            # Read in one piece: a process that makes a new text for each call reuses a slot after a few milliseconds.
            slots = self._peek(TEXTS_AT, layout.SIZE - TEXTS_AT) if unknown else b""
            agreed = [words for words, again in zip(first, self._ring(), strict=True) if words == again and any(words)]
            numbers = {words[1] for words in agreed}
            self._texts = {number: known_texts.get(number) or _text(slots, number) for number in numbers}
            calls = sorted(call for call in map(self._call, agreed) if call is not None)
            if calls or not any(map(any, first)):
                break
        return [call for call in calls if call.order > calls[-1].order - CALLS]

    def _ring(self) -> list[tuple[int, ...]]:
        return list(layout.CALL.iter_unpack(self._peek(layout.CALLS_AT, CALLS * layout.CALL.size)))

    def _call(self, words: tuple[int, ...]) -> RecordedCall | None:
        """The call that these words describe; None if it is being written."""
        index, text, number, queued, started, ended, stamp = words
        state = layout.STATES.get(stamp & (1 << layout.STATE_BITS) - 1)
        if state is None or index != stamp >> layout.STATE_BITS:
            return None
        communicator, name, dtype, shape, more, file, line = self._texts[text] or _UNKNOWN
        # A time is written just before the state to which it belongs, and is not valid until then.
        if state == "queued":
            started = 0
        if state not in ("done", "failed"):
            ended = 0
        return RecordedCall(
            index, communicator, number, state, queued, started, ended, name, dtype, shape, more, file, int(line)
        )


def _text(slots: bytes, number: int) -> list[str] | None:
    """The fields of a call text; None if it has been overwritten. slots: the slots of all texts"""
    start = layout.text_at(number) - TEXTS_AT
    slot = unpack_text(slots[start : start + layout.TEXT_SIZE], 7)
    return slot[1] if slot is not None and slot[0] == number else None


def read(pid: int) -> FlightRecord:
    """Reads a process's flight record from outside.

    Raises: RecordError if there is no such process, it keeps no record, or we may not read it.
    """
    with FlightReader.of(pid) as reader:
        return reader.record()


def state_of(pid: int) -> str:
    """The state of a process as one letter (R, S, D, T, t, Z); "" if it has ended."""
    return _proc(pid, "stat").rpartition(") ")[2][:1]


def _site(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def seconds(since: int, now: int) -> float:
    return round(max(0, now - since) / 1e9, 2)


def _is_record(pid: int, fd: int) -> bool:
    """Whether a file descriptor is that of a record; False if it has been closed.

    A forked child inherits two descriptors of its parent's record, and at once closes the one that `mmap` duplicated.
    """
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"/memfd:{layout.NAME}")
    except OSError:
        return False


def _explain(pid: int, error: OSError) -> RecordError:
    if isinstance(error, PermissionError) and state_of(pid) != "Z":
        return RecordError(f"process {pid} may not be looked into: it belongs to another user")
    if os.path.exists(f"/proc/{pid}"):
        return RecordError(f"process {pid} has ended" if state_of(pid) == "Z" else f"process {pid}: {error}")
    return RecordError(f"there is no process {pid}")


def _own_pid(pid: int) -> int:
    """The pid that the process itself sees, which differs in a container."""
    numbers = _proc(pid, "status").partition("NSpid:")[2].split("\n")[0].split()
    return int(numbers[-1]) if numbers else pid  # No numbers: it has ended, or we may not see it.


def _proc(pid: int, name: str) -> str:
    """The first 4096 characters of a file in /proc/PID; "" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


# As text, for time limits, hang reports and `ddp-doctor calls` --------------------------------------------------------


def describe_process(pid: int) -> str:
    """What another process did last and where its Python code is, as text; or why that is unknown."""
    try:
        record = read(pid)
    except RecordError as error:
        return str(error)
    stopped = "stopped by a signal or a debugger; " if state_of(pid) in ("T", "t") else ""
    return stopped + describe_last(record, time.monotonic_ns())


def on_communicator(label: str) -> str:
    """Names the communicator: `" on world.1 (DataParallel of Net)"`; "" for the world."""
    return "" if label == "world" else f" on {label}"


def describe_last(record: FlightRecord, now: int) -> str:
    """What a process did last, as text.

    now: the time by the monotonic clock (ns)

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


def calls_table(records: Sequence[FlightRecord], now: int, last: int = 10) -> str:
    """The last calls of several ranks, and where their Python code is, as aligned text.

    now: the time by the monotonic clock (ns); last: number of calls shown for each rank
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
