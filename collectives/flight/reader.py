"""The reading side of the flight recorder, from any process of the same user, at any moment.

Nothing is asked of the process that is read: it may be stopped, compute with the GIL held, or write a million calls a
second. A call is believed only if two readings of the whole ring agree on it, with its texts read between them: what
a call of the ring points to is not overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from collectives.errors import RecordError
from collectives.flight.layout import (
    CALL,
    CALL_SIZE,
    CALLS,
    CALLS_AT,
    STATE_BITS,
    STATES,
)
from collectives.flight.report import FlightRecord, Position, RecordedCall, describe_last
from collectives.flight.view import View, is_stopped

_ATTEMPTS = 5
_WORDS = CALL_SIZE // 8
_UNKNOWN = ("?", "", "", "", "?", "0")


class Window(View):
    """A view of one process's record that reads all of it."""

    def __init__(self, peek: Callable[[int, int], bytes], fd: int | None = None) -> None:
        super().__init__(peek, fd)
        self._signatures: dict[int, tuple[str, ...] | None] = {}  # a number never changes its meaning
        self._communicators: dict[int, str] = {}

    def read(self) -> FlightRecord:
        """What the process has done so far. Raises: RecordError if this is no flight record."""
        pid, rank, size, clock, step = self.header()
        found: dict[int, RecordedCall] = {}
        for _ in range(_ATTEMPTS):
            first = self._peek(CALLS_AT, CALLS * CALL_SIZE)
            self._learn(first)  # little to do but for the first time: the two readings lie close together
            second = self._peek(CALLS_AT, CALLS * CALL_SIZE)
            if not self._believe(first, second, found):
                break
        newest = max(found, default=0)
        calls = [found[index] for index in sorted(found) if index > newest - CALLS]
        stood = self.position()
        position = None if stood is None else Position(stood[0], *stood[1], stood[2])
        return FlightRecord(pid, rank, size, clock, calls, position, step)

    def _learn(self, ring: bytes) -> None:
        """Reads the texts to which the ring points, as far as they are not known, and forgets all others."""
        words = memoryview(ring).cast("q")
        known, self._communicators = self._communicators, {}
        for number in set(words[1::_WORDS].tolist()):
            self._communicators[number] = known.get(number) or self.communicator(number)
        before, self._signatures = self._signatures, {}
        for number in set(words[3::_WORDS].tolist()):
            self._signatures[number] = before.get(number) or self.signature(number)

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


def describe_process(pid: int) -> str:
    """What another process did last and where its Python stands, in words; else why that is not known."""
    try:
        record = read(pid)
    except RecordError as error:
        return str(error)
    stopped = "stopped by a signal or a debugger; " if is_stopped(pid) else ""
    return stopped + describe_last(record, time.monotonic_ns())


def read(pid: int) -> FlightRecord:
    """What process `pid` has done so far, read from outside.

    Raises: RecordError if there is no such process, it keeps no record, or we may not read it.
    """
    with Window.of(pid) as window:
        return window.read()
