"""The reading side of the flight recorder, from any process of the same user, at any moment.

Nothing is asked of the process that is read: it may be stopped, compute with the GIL held, or write a million calls a
second. A call is believed only if two readings of the whole ring agree on it, with its texts read between them: what
a call of the ring points to is not overwritten. This module imports almost nothing, for the launcher's keeper.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from collectives.errors import RecordError
from collectives.flight.layout import (
    CALL,
    CALL_SIZE,
    CALLS,
    CALLS_AT,
    COMMUNICATOR_SIZE,
    HEADER,
    MAGIC,
    NAME,
    POSITION_AT,
    POSITION_SIZE,
    SIGNATURE_SIZE,
    SIZE,
    STATE_BITS,
    STATES,
    VERSION,
    communicator_at,
    signature_at,
    unpack_text,
)
from collectives.flight.report import FlightRecord, Position, RecordedCall

_ATTEMPTS = 5
_WORDS = CALL_SIZE // 8
_UNKNOWN = ("?", "", "", "", "?", "0")


class Window:
    """A view of one process's record: opened once, read many times, also after the process has died.

    peek: returns the `length` bytes at `offset` of the record
    """

    def __init__(self, peek: Callable[[int, int], bytes], fd: int | None = None) -> None:
        self._peek = peek
        self._fd = fd
        self._signatures: dict[int, tuple[str, ...] | None] = {}  # a number never changes its meaning
        self._communicators: dict[int, str] = {}

    @classmethod
    def of(cls, pid: int) -> Window:
        """The record of a running process. Raises: RecordError if it has none, or it is not ours to read."""
        inherited, damaged = 0, None
        for fd in _candidates(pid):
            try:
                window = cls.of_fd(pid, fd)
            except RecordError as error:
                damaged = error
                continue
            owner = window.header()[0]
            if owner == _own_pid(pid):
                return window
            inherited = owner
            window.close()
        if damaged is not None:
            raise damaged
        if inherited:
            raise RecordError(f"process {pid} keeps no flight record of its own; process {inherited} does, its parent")
        if _is_zombie(pid):
            raise RecordError(f"process {pid} has ended")
        raise RecordError(
            f"process {pid} ({_command(pid)}) keeps no flight record: it is no rank, or has not initialized collectives"
        )

    @classmethod
    def of_fd(cls, pid: int, fd: int) -> Window:
        """The record that process `pid` has open as `fd`. Raises: RecordError"""
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _refusal(pid, error, fd) from None
        # Read, never mapped: a foreign file may shrink, and a mapping of it would kill the reader.
        window = cls(lambda offset, length: os.pread(own, length, offset), own)
        try:
            window.header()
        except RecordError as error:
            window.close()
            raise RecordError(f"process {pid}, file descriptor {fd}: {error}") from None
        return window

    def close(self) -> None:
        """Closes the file; may be called again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def header(self) -> tuple[int, int, int, int]:
        """pid, rank, size and clock. Raises: RecordError if this is no flight record."""
        data = self._peek(0, HEADER.size)
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise RecordError("this is not a flight record, or it is only being made")
        _, version, size, pid, rank, world_size, clock = HEADER.unpack(data)
        if version != VERSION:
            raise RecordError(f"a flight record of layout {version}, but this reader knows layout {VERSION}")
        if size != SIZE or not self._peek(SIZE - 1, 1):
            raise RecordError("a damaged flight record: it has not the size that it should have")
        return pid, rank, world_size, clock

    def read(self) -> FlightRecord:
        """What the process has done so far. Raises: RecordError if this is no flight record."""
        header = self.header()
        found: dict[int, RecordedCall] = {}
        for _ in range(_ATTEMPTS):
            first = self._peek(CALLS_AT, CALLS * CALL_SIZE)
            self._learn(first)  # little to do but for the first time: the two readings lie close together
            second = self._peek(CALLS_AT, CALLS * CALL_SIZE)
            if not self._believe(first, second, found):
                break
        newest = max(found, default=0)
        calls = [found[index] for index in sorted(found) if index > newest - CALLS]
        return FlightRecord(*header, calls, self._position())

    def _learn(self, ring: bytes) -> None:
        """Reads the texts to which the ring points, as far as they are not known, and forgets all others."""
        words = memoryview(ring).cast("q")
        known, self._communicators = self._communicators, {}
        for number in set(words[1::_WORDS].tolist()):
            self._communicators[number] = known.get(number) or self._communicator(number)
        before, self._signatures = self._signatures, {}
        for number in set(words[3::_WORDS].tolist()):
            self._signatures[number] = before.get(number) or self._signature(number)

    def _believe(self, first: bytes, second: bytes, found: dict[int, RecordedCall]) -> bool:
        """Enters into `found` the calls on which two readings agree; True if there are others, which deserve a look."""
        moved = False
        for slot, words in enumerate(CALL.iter_unpack(first)):
            index, communicator, number, signature, queued, started, ended, stamp = words
            if index == 0 and stamp == 0:
                continue  # not used yet
            state = STATES.get(stamp & (1 << STATE_BITS) - 1)
            whole = state is not None and index == stamp >> STATE_BITS and index % CALLS == slot
            same = slice(slot * CALL_SIZE, (slot + 1) * CALL_SIZE)
            if not whole or first[same] != second[same]:
                moved = True
                continue
            assert state is not None
            name, dtype, shape, more, file, line = self._signatures[signature] or _UNKNOWN
            found[index] = RecordedCall(
                order=index,
                communicator=self._communicators[communicator],
                number=number,
                state=state,
                queued=queued,
                # A time is written just before the state to which it belongs, and means nothing until then.
                started=started if state != "queued" else 0,
                ended=ended if state in ("done", "failed") else 0,
                name=name,
                more=more,
                dtype=dtype,
                shape=shape,
                file=file,
                line=int(line),
            )
        return moved

    def _communicator(self, number: int) -> str:
        found = unpack_text(self._peek(communicator_at(number), COMMUNICATOR_SIZE), 1) if number > 0 else None
        return found[1][0] if found is not None and found[0] == number else f"communicator {number}"

    def _signature(self, number: int) -> tuple[str, ...] | None:
        found = unpack_text(self._peek(signature_at(number), SIGNATURE_SIZE), len(_UNKNOWN))
        return tuple(found[1]) if found is not None and found[0] == number else None

    def _position(self) -> Position | None:
        for _ in range(_ATTEMPTS):
            found = unpack_text(self._peek(POSITION_AT, POSITION_SIZE), 6)
            if found is not None:
                at, (file, line, function, in_file, in_line, in_function) = found
                within = (in_file, int(in_line), in_function) if in_file else None
                return Position(at, file, int(line), function, within)
        return None


def read(pid: int) -> FlightRecord:
    """What process `pid` has done so far, read from outside.

    Raises: RecordError if there is no such process, it keeps no record, or we may not read it.
    """
    with Window.of(pid) as window:
        return window.read()


def read_fd(pid: int, fd: int) -> FlightRecord:
    """The same, from the memfd that process `pid` has open as `fd`. Raises: RecordError"""
    with Window.of_fd(pid, fd) as window:
        return window.read()


def _candidates(pid: int) -> list[int]:
    """The file descriptors that may be a process's record, or that of a parent from which it was forked."""
    folder = f"/proc/{pid}/fd"
    found = []
    try:
        for entry in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{entry}").startswith(f"/memfd:{NAME}"):
                    found.append(int(entry))
            except FileNotFoundError:  # closed meanwhile
                pass
    except OSError as error:
        raise _refusal(pid, error) from None
    return found


def _own_pid(pid: int) -> int:
    """What the process itself takes for its pid, which is another number in a container."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
    except OSError:
        pass
    return pid


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words if len(words) <= 80 else words[:79] + "…"


def _refusal(pid: int, error: OSError, fd: int = -1) -> RecordError:
    if isinstance(error, PermissionError):
        if _is_zombie(pid):
            return RecordError(f"process {pid} has ended")
        return RecordError(f"process {pid} may not be looked into: it belongs to another user")
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        if fd >= 0 and os.path.exists(f"/proc/{pid}"):
            return RecordError(f"process {pid} has no file descriptor {fd}")
        return RecordError(f"there is no process {pid}")
    return RecordError(f"process {pid} cannot be looked into: {error}")


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False
