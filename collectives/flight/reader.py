"""The reading side of a flight record: from any process of the same user, at any moment.

Nothing is asked of the process that is read: it may be stopped, compute with the GIL held, or write a million calls a
second. A call is believed only if two readings of the ring agree on it, with its texts read between them: what a call
of the ring points to is not overwritten.

Each rank's agent holds a reader and asks for the newest call every second, so this module imports almost nothing.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable

from collectives.errors import RecordError
from collectives.flight import layout
from collectives.flight.layout import CALLS, FIGURES, NOT_KNOWN, SIGNATURES_AT, unpack_text

TYPE_CHECKING = False  # not of `typing`, whose import would cost an agent a tenth of its memory
if TYPE_CHECKING:
    from typing_extensions import Self

_ATTEMPTS = 5
_UNKNOWN = ["?", "?", "", "", "", "?", "0"]


class RecordedCall(
    namedtuple(
        "RecordedCall",
        "order communicator number state queued started ended name dtype shape more file line",
    )
):
    """One call of a process. Times are of the monotonic clock, in ns; 0: not yet.

    order: counts all calls of the process from 1; number: those of its communicator, from 0
    communicator: its key, and what it is used for if that was said; state: "queued", "started", "done" or "failed"
    name, dtype, shape, more: all_reduce, float32, (512, 10), sum, as text; file, line: of the user's code
    """

    __slots__ = ()

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.name} #{self.number} ({self.site})", self.more, self.dtype, self.shape)))

    @property
    def site(self) -> str:
        """`train.py:88`"""
        return _site(self.file, self.line)

    @property
    def since(self) -> int:
        """When it came into its state."""
        return int({"queued": self.queued, "started": self.started}.get(self.state, self.ended))


class Position(namedtuple("Position", "time file line function within")):
    """Where the main thread's Python code stood.

    time: of the sample; monotonic clock, ns
    file, line, function: the innermost frame of the user's code
    within: file, line and function of the innermost frame of all, if that one is a library's or ours
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
    calls: the last ones, in the order in which they began; those being written at this moment are missing
    position: the last sample, None if none was taken
    step: that it has finished, by the program's own count or else that of `ddp.DataParallel`; None if neither counts
    figures: FIGURES, in their order
    """

    __slots__ = ()

    @property
    def current(self) -> tuple[RecordedCall | None, int]:
        """The last call, or the one for which it waits, and how many more are queued; None before any."""
        if not self.calls or self.calls[-1].state != "queued":
            return (self.calls[-1] if self.calls else None), 0
        queued = sum(call.state == "queued" for call in self.calls)
        return next(((call, queued) for call in reversed(self.calls) if call.state == "started"), (self.calls[-1], 0))


class FlightReader:
    """One process's flight record: opened once, read many times, also after the process has died.

    peek: returns the `length` bytes at `offset` of the record
    """

    def __init__(self, peek: Callable[[int, int], bytes], fd: int | None = None) -> None:
        self._peek = peek
        self._fd = fd
        self._signatures: dict[int, list[str] | None] = {}  # a number never changes its meaning

    @classmethod
    def of(cls, pid: int) -> Self:
        """The record of a running process. Raises: RecordError if it has none, or it is not ours to read."""
        try:
            fds = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd") if _is_record(pid, fd)]
        except OSError as error:
            raise _explain(pid, error) from None
        for fd in fds:
            reader = cls.of_fd(pid, fd)
            # Else it is a parent's, or that of an agent's rank.
            if reader.record(with_calls=False).pid == _own_pid(pid):
                return reader
            reader.close()
        if state_of(pid) == "Z":
            raise RecordError(f"process {pid} has ended")
        raise RecordError(f"process {pid} keeps no flight record: it is no rank, or has not initialized collectives")

    @classmethod
    def of_fd(cls, pid: int, fd: int) -> Self:
        """The record that process `pid` has open as `fd`. Raises: RecordError"""
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _explain(pid, error) from None
        # Read, never mapped: a foreign file may shrink, and a mapping of it would kill the reader.
        reader = cls(lambda offset, length: os.pread(own, length, offset), own)
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
        """What the process has done so far. Raises: RecordError if this is no flight record."""
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
        """What the process does, as a message. Raises: RecordError.

        now: of the monotonic clock, ns
        step: that it has finished, None if nothing counts them
        calls: how many it has begun; call: the last one in words, or the one for which it waits; call_on: its
        communicator; call_state: queued, started, done or failed; call_age: seconds in that state. None before any
        where: line and function in which its Python stood, where_age: seconds ago. None if no sample was taken
        samples and so on: FIGURES that are known
        """
        record = self.record()
        call, stood = record.current[0], record.position
        return {
            "step": record.step,
            "calls": record.calls[-1].order if record.calls else 0,
            "call": call and str(call),
            "call_on": call and call.communicator,
            "call_state": call and call.state,
            "call_age": call and seconds(call.since, now),
            "where": stood and f"{_site(stood.file, stood.line)} in {stood.function}",
            "where_age": stood and seconds(stood.time, now),
            **{name: figure for name, figure in zip(FIGURES, record.figures, strict=True) if figure != NOT_KNOWN},
        }

    def _position(self) -> Position | None:
        for _ in range(_ATTEMPTS):
            found = unpack_text(self._peek(layout.POSITION_AT, layout.POSITION_SIZE), 6)
            if found is not None:
                at, (file, line, function, in_file, in_line, in_function) = found
                within = (in_file, int(in_line), in_function) if in_file else None
                return Position(at, file, int(line), function, within)
        return None

    def _calls(self) -> list[RecordedCall]:
        for _ in range(_ATTEMPTS):
            first, known = self._ring(), self._signatures
            unknown = any(not known.get(words[1]) for words in first)
            # In one piece: a process whose calls all differ is once around the ring in a few milliseconds.
            texts = self._peek(SIGNATURES_AT, layout.SIZE - SIGNATURES_AT) if unknown else b""
            agreed = [words for words, again in zip(first, self._ring(), strict=True) if words == again and any(words)]
            numbers = {words[1] for words in agreed}
            self._signatures = {number: known.get(number) or _signature(texts, number) for number in numbers}
            calls = sorted(call for call in map(self._call, agreed) if call is not None)
            if calls or not any(map(any, first)):
                break
        return [call for call in calls if call.order > calls[-1].order - CALLS]

    def _ring(self) -> list[tuple[int, ...]]:
        return list(layout.CALL.iter_unpack(self._peek(layout.CALLS_AT, CALLS * layout.CALL.size)))

    def _call(self, words: tuple[int, ...]) -> RecordedCall | None:
        """The call that these words describe; None if it is being written."""
        index, signature, number, queued, started, ended, stamp = words
        state = layout.STATES.get(stamp & (1 << layout.STATE_BITS) - 1)
        if state is None or index != stamp >> layout.STATE_BITS:
            return None
        communicator, name, dtype, shape, more, file, line = self._signatures[signature] or _UNKNOWN
        # A time is written just before the state to which it belongs, and means nothing until then.
        started, ended = started if state != "queued" else 0, ended if state in ("done", "failed") else 0
        return RecordedCall(
            index, communicator, number, state, queued, started, ended, name, dtype, shape, more, file, int(line)
        )


def _signature(texts: bytes, number: int) -> list[str] | None:
    """The texts of a signature, out of those of all; None if it has been overwritten."""
    at = layout.signature_at(number) - SIGNATURES_AT
    found = unpack_text(texts[at : at + layout.SIGNATURE_SIZE], 7)
    return found[1] if found is not None and found[0] == number else None


def read(source: int | FlightReader) -> FlightRecord:
    """What a process has done so far, read from outside. source: its pid, or a reader of its record

    Raises: RecordError if there is no such process, it keeps no record, or we may not read it.
    """
    if isinstance(source, FlightReader):
        return source.record()
    with FlightReader.of(source) as reader:
        return reader.record()


def state_of(pid: int) -> str:
    """The state of a process as one letter (R, S, D, T, t, Z); "" once it has gone."""
    return _proc(pid, "stat").rpartition(") ")[2][:1]


def _site(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def seconds(since: int, now: int) -> float:
    return round(max(0, now - since) / 1e9, 2)


def _is_record(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"/memfd:{layout.NAME}")
    except FileNotFoundError:  # closed meanwhile
        return False


def _explain(pid: int, error: OSError) -> RecordError:
    if isinstance(error, PermissionError) and state_of(pid) != "Z":
        return RecordError(f"process {pid} may not be looked into: it belongs to another user")
    if os.path.exists(f"/proc/{pid}"):
        return RecordError(f"process {pid} has ended" if state_of(pid) == "Z" else f"process {pid}: {error}")
    return RecordError(f"there is no process {pid}")


def _own_pid(pid: int) -> int:
    """What the process itself takes for its pid, which is another number in a container."""
    numbers = _proc(pid, "status").partition("NSpid:")[2].split("\n")[0].split()
    return int(numbers[-1]) if numbers else pid  # without: it has ended, or hides from us


def _proc(pid: int, name: str) -> str:
    """The start of a file of /proc/PID; "" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
