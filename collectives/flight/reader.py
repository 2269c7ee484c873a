"""The reading side of the flight recorder, from any process of the same user, at any moment.

Nothing is asked of the process that is read: it may be stopped, compute with the GIL held, or write a million calls a
second. A call is believed only if two readings of the whole ring agree on it, with its texts read between them: what
a call of the ring points to is not overwritten.

Each rank's agent holds a reader and asks for the newest call every second, so this module imports almost nothing;
`report` makes typed records of what it returns.
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
    QUEUED,
    SIGNATURE_SIZE,
    SIZE,
    STARTED,
    STATE_BITS,
    STATES,
    VERSION,
    communicator_at,
    signature_at,
    unpack_text,
)

TYPE_CHECKING = False  # not of `typing`, whose import would cost an agent a tenth of its memory
if TYPE_CHECKING:
    from typing_extensions import Self

Location = tuple[str, int, str]  # file, line, function
#: order, communicator, number, state, queued, started, ended, then name, dtype, shape, more, file, line: `RecordedCall`
RawCall = tuple[int, str, int, str, int, int, int, str, str, str, str, str, int]

_ATTEMPTS = 5
_WORDS = CALL_SIZE // 8
_STATE = (1 << STATE_BITS) - 1
_UNKNOWN = ("?", "", "", "", "?", "0")


class FlightReader:
    """One process's flight record: opened once, read many times, also after the process has died.

    peek: returns the `length` bytes at `offset` of the record
    """

    def __init__(self, peek: Callable[[int, int], bytes], fd: int | None = None) -> None:
        self._peek = peek
        self._fd = fd
        self._signatures: dict[int, tuple[str, ...] | None] = {}  # a number never changes its meaning
        self._communicators: dict[int, str] = {}

    @classmethod
    def of(cls, pid: int) -> Self:
        """The record of a running process. Raises: RecordError if it has none, or it is not ours to read."""
        inherited, damaged = 0, None
        for fd in _candidates(pid):
            try:
                reader = cls.of_fd(pid, fd)
            except RecordError as error:
                damaged = error
                continue
            owner = reader.header()[0]
            if owner == _own_pid(pid):
                return reader
            inherited = owner
            reader.close()
        if damaged is not None:
            raise damaged
        if inherited:
            kin = "its child" if _parent(inherited) == pid else "its parent"  # an agent has its rank's open
            raise RecordError(f"process {pid} keeps no flight record of its own; process {inherited} does, {kin}")
        if state_of(pid) == "Z":
            raise RecordError(f"process {pid} has ended")
        raise RecordError(
            f"process {pid} ({_command(pid)}) keeps no flight record: it is no rank, or has not initialized collectives"
        )

    @classmethod
    def of_fd(cls, pid: int, fd: int) -> Self:
        """The record that process `pid` has open as `fd`. Raises: RecordError"""
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _explain(pid, error, fd) from None
        # Read, never mapped: a foreign file may shrink, and a mapping of it would kill the reader.
        reader = cls(lambda offset, length: os.pread(own, length, offset), own)
        try:
            reader.header()
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

    def header(self) -> tuple[int, int, int, int, int | None]:
        """pid, rank, size, clock and step. Raises: RecordError if this is no flight record."""
        data = self._peek(0, HEADER.size)
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise RecordError("this is not a flight record, or it is only being made")
        _, version, size, pid, rank, world_size, clock, step, backwards = HEADER.unpack(data)
        if version != VERSION:
            raise RecordError(f"a flight record of layout {version}, but this reader knows layout {VERSION}")
        if size != SIZE or not self._peek(SIZE - 1, 1):
            raise RecordError("a damaged flight record: it has not the size that it should have")
        counted = step if step >= 0 else backwards
        return pid, rank, world_size, clock, counted if counted >= 0 else None

    def position(self) -> tuple[int, Location, Location | None] | None:
        """When (ns, monotonic clock) and where the main thread's Python stood, and within what; None: no sample."""
        for _ in range(_ATTEMPTS):
            found = unpack_text(self._peek(POSITION_AT, POSITION_SIZE), 6)
            if found is not None:
                at, (file, line, function, in_file, in_line, in_function) = found
                return at, (file, int(line), function), (in_file, int(in_line), in_function) if in_file else None
        return None

    def newest(self, now: int) -> dict[str, object]:
        """What the process does, as a message, cheaply enough for every second. Raises: RecordError.

        now: of the monotonic clock, ns
        step: that it has finished, None if nothing counts them
        calls: how many it has begun; call: the last one in words, or the one for which it waits; call_on: its
        communicator; call_state: queued, started, done or failed; call_age: seconds in that state. None before any
        where: line and function in which its Python stood, where_age: seconds ago. None if no sample was taken
        """
        begun, found = self._newest_words()
        message: dict[str, object] = {"step": self.header()[4], "calls": begun}
        message |= dict.fromkeys(("call", "call_on", "call_state", "call_age", "where", "where_age"))
        if found is not None:
            _, communicator, number, signature, queued, started, ended, stamp = found
            name, dtype, shape, more, file, line = self._signature(signature) or _UNKNOWN
            state = STATES[stamp & _STATE]
            since = {"queued": queued, "started": started}.get(state, ended)
            message["call"] = format_call(name, number, file, int(line), more, dtype, shape)
            message["call_on"] = self._communicator(communicator)
            message["call_state"], message["call_age"] = state, _seconds(now - since)
        stood = self.position()
        if stood is not None:
            at, (file, line_, function), _ = stood
            message["where"], message["where_age"] = f"{format_site(file, line_)} in {function}", _seconds(now - at)
        return message

    def _newest_words(self) -> tuple[int, tuple[int, ...] | None]:
        """How many calls have begun, and the words of the newest; of the newest under way, if that one is queued."""
        begun = 0
        for _ in range(_ATTEMPTS):
            stamps = memoryview(self._peek(CALLS_AT, CALLS * CALL_SIZE)).cast("q")[_WORDS - 1 :: _WORDS].tolist()
            newest = max(stamps)
            begun = newest >> STATE_BITS
            if begun == 0:
                break
            if newest & _STATE == QUEUED:  # what it waits for tells more
                newest = max((stamp for stamp in stamps if stamp & _STATE == STARTED), default=newest)
            index = newest >> STATE_BITS
            words = CALL.unpack(self._peek(CALLS_AT + index % CALLS * CALL_SIZE, CALL_SIZE))
            # Its state may have moved on meanwhile, and is then what it says now; another call may not have come.
            if words[0] == index == words[-1] >> STATE_BITS and words[-1] & _STATE in STATES:
                return begun, words
        return begun, None  # none yet, or it makes calls faster than we can read

    def calls(self) -> list[RawCall]:
        """The last calls in the order in which they began; those being written at this moment are missing."""
        found: dict[int, RawCall] = {}
        for _ in range(_ATTEMPTS):
            first = self._peek(CALLS_AT, CALLS * CALL_SIZE)
            self._learn(first)  # little to do but for the first time: the two readings lie close together
            second = self._peek(CALLS_AT, CALLS * CALL_SIZE)
            if not self._add_agreed(first, second, found):
                break
        newest = max(found, default=0)
        return [found[index] for index in sorted(found) if index > newest - CALLS]

    def _learn(self, ring: bytes) -> None:
        """Reads the texts to which the ring points, as far as they are not known, and forgets all others."""
        words = memoryview(ring).cast("q")
        known, numbers = self._communicators, set(words[1::_WORDS].tolist())
        self._communicators = {number: known.get(number) or self._communicator(number) for number in numbers}
        before, numbers = self._signatures, set(words[3::_WORDS].tolist())
        self._signatures = {number: before.get(number) or self._signature(number) for number in numbers}

    def _add_agreed(self, first: bytes, second: bytes, found: dict[int, RawCall]) -> bool:
        """Enters into `found` the calls on which two readings agree; True if there are others, to be read again."""
        moved = False
        for slot, words in enumerate(CALL.iter_unpack(first)):
            index, communicator, number, signature, queued, started, ended, stamp = words
            if index == 0 and stamp == 0:
                continue  # not used yet
            state = STATES.get(stamp & _STATE)
            same = slice(slot * CALL_SIZE, (slot + 1) * CALL_SIZE)
            whole = index == stamp >> STATE_BITS and index % CALLS == slot and first[same] == second[same]
            if state is None or not whole:
                moved = True
                continue
            # A time is written just before the state to which it belongs, and means nothing until then.
            times = (queued, started if state != "queued" else 0, ended if state in ("done", "failed") else 0)
            name, dtype, shape, more, file, line = self._signatures[signature] or _UNKNOWN
            key = self._communicators[communicator]
            found[index] = (index, key, number, state, *times, name, dtype, shape, more, file, int(line))
        return moved

    def _communicator(self, number: int) -> str:
        """The key of a communicator."""
        found = unpack_text(self._peek(communicator_at(number), COMMUNICATOR_SIZE), 1) if number > 0 else None
        return found[1][0] if found is not None and found[0] == number else f"communicator {number}"

    def _signature(self, number: int) -> tuple[str, ...] | None:
        """Name, dtype, shape, more, file and line of a signature, as text; None if it has been evicted."""
        found = unpack_text(self._peek(signature_at(number), SIGNATURE_SIZE), 6)
        return tuple(found[1]) if found is not None and found[0] == number else None


def format_site(file: str, line: int) -> str:
    """`train.py:88`"""
    return f"{os.path.basename(file)}:{line}"


def format_call(name: str, number: int, file: str, line: int, more: str, dtype: str, shape: str) -> str:
    """`all_reduce #417 (train.py:88) sum float32 (512, 10)`; what is "" is left out."""
    what = " ".join(each for each in (more, dtype, shape) if each)
    return f"{name} #{number} ({format_site(file, line)}) {what}".rstrip()


def state_of(pid: int) -> str:
    """The state of a process as one letter (R, S, D, T, t, Z); "" once it has gone."""
    return _stat(pid)[0]


def _seconds(nanoseconds: int) -> float:
    return round(max(0, nanoseconds) / 1e9, 2)


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
        raise _explain(pid, error) from None
    return found


def _explain(pid: int, error: OSError, fd: int = -1) -> RecordError:
    if isinstance(error, PermissionError):
        if state_of(pid) == "Z":
            return RecordError(f"process {pid} has ended")
        return RecordError(f"process {pid} may not be looked into: it belongs to another user")
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        if fd >= 0 and os.path.exists(f"/proc/{pid}"):
            return RecordError(f"process {pid} has no file descriptor {fd}")
        return RecordError(f"there is no process {pid}")
    return RecordError(f"process {pid} cannot be looked into: {error}")


def _own_pid(pid: int) -> int:
    """What the process itself takes for its pid, which is another number in a container."""
    for line in _proc(pid, "status").splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return pid  # it has ended, or hides from us: what follows says so


def _command(pid: int) -> str:
    words = _proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return words if len(words) <= 80 else words[:79] + "…"


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says from the process's state on; "" and "0" of one that has gone."""
    return _proc(pid, "stat").rpartition(b")")[2].decode().split() or ["", "0"]


def _proc(pid: int, name: str) -> bytes:
    """The start of a file of /proc/PID; b"" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(4096)
    except OSError:
        return b""
