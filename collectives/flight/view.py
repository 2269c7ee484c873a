"""One process's flight record, opened: how it is found, and what its header and its tables of texts say.

Nothing is asked of the process that is read. This module imports almost nothing, for the launcher's keeper.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from collectives.errors import RecordError
from collectives.flight.layout import (
    COMMUNICATOR_SIZE,
    HEADER,
    MAGIC,
    NAME,
    POSITION_AT,
    POSITION_SIZE,
    SIGNATURE_SIZE,
    SIZE,
    VERSION,
    communicator_at,
    signature_at,
    unpack_text,
)

TYPE_CHECKING = False  # not of `typing`, whose import would cost a keeper a tenth of its memory
if TYPE_CHECKING:
    from typing_extensions import Self

Place = tuple[str, int, str]  # file, line, function
_ATTEMPTS = 5


class View:
    """One process's record: opened once, read many times, also after the process has died.

    peek: returns the `length` bytes at `offset` of the record
    """

    def __init__(self, peek: Callable[[int, int], bytes], fd: int | None = None) -> None:
        self._peek = peek
        self._fd = fd

    @classmethod
    def of(cls, pid: int) -> Self:
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
            kin = "its child" if _parent(inherited) == pid else "its parent"  # a keeper has its rank's open
            raise RecordError(f"process {pid} keeps no flight record of its own; process {inherited} does, {kin}")
        if _is_zombie(pid):
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

    def communicator(self, number: int) -> str:
        """The key of a communicator."""
        found = unpack_text(self._peek(communicator_at(number), COMMUNICATOR_SIZE), 1) if number > 0 else None
        return found[1][0] if found is not None and found[0] == number else f"communicator {number}"

    def signature(self, number: int) -> tuple[str, ...] | None:
        """Name, dtype, shape, more, file and line of a signature, as text; None if it has been given up."""
        found = unpack_text(self._peek(signature_at(number), SIGNATURE_SIZE), 6)
        return tuple(found[1]) if found is not None and found[0] == number else None

    def position(self) -> tuple[int, Place, Place | None] | None:
        """When (ns, monotonic clock) and where the main thread's Python stood, and within what; None: no sample."""
        for _ in range(_ATTEMPTS):
            found = unpack_text(self._peek(POSITION_AT, POSITION_SIZE), 6)
            if found is not None:
                at, (file, line, function, in_file, in_line, in_function) = found
                return at, (file, int(line), function), (in_file, int(in_line), in_function) if in_file else None
        return None


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
        pass  # it has ended, or hides from us: what follows says so
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


def is_stopped(pid: int) -> bool:
    """True for a process that a signal or a debugger has stopped."""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == [b"Z"]


def _parent(pid: int) -> int:
    stat = _stat(pid)
    return int(stat[1]) if stat else 0


def _stat(pid: int) -> list[bytes]:
    """What /proc/PID/stat says from the process's state on; [] of one that has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
