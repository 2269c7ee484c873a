"""Graph capture: work of a capturing stream is recorded, and done by every launch of the graph, on the same memory.

A stream takes part in a capture from its first wait for an event of it. A graph keeps an order between its streams only
where an event gave one, so each has a queue of its own in a launch. What CUDA refuses is refused, and breaks the
capture where CUDA says so: waiting for events from outside, asking captured events, streams that were not joined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddp._cuda import capture
from ddp.cuda import _graphed_step
from tests.collectives.backends.device.machine import Mark, Meeting

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
_WHY = {
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    901: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    903: "cudaErrorStreamCaptureUnmatched: capture was not initiated in this stream",
    904: "cudaErrorStreamCaptureUnjoined: capturing stream has unjoined work",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    907: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
    908: "cudaErrorStreamCaptureWrongThread: attempt to terminate a thread-local capture sequence from another thread",
}


class Piece(NamedTuple):
    """What one stream does at one point of a graph. meet: gives the meeting with other ranks, anew for each launch"""

    stream: int
    kind: str
    run: Callable[[], None] | None = None
    waits: Mark | None = None
    records: Mark | None = None
    meet: Callable[[], Meeting] | None = None


class Sequence:
    """One capture under way. reached: for each stream, how far it comes after every stream"""

    def __init__(self, origin: int, mode: int) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.pieces: list[Piece] = []
        self.reached: dict[int, dict[int, int]] = {origin: {}}
        self.broken = False

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.waits is not None or piece.records is not None or piece.kind == "free":
            return  # an edge, or what somebody else may do there: no work that has to be joined
        own = self.reached[piece.stream]
        own[piece.stream] = own.get(piece.stream, 0) + 1


class Graph:
    """`cupy.cuda.Graph`."""

    def __init__(self, cupy: Cupy, pieces: list[Piece]) -> None:
        self._cupy = cupy
        self._pieces = pieces
        self._queues: dict[int, int] = {}

    def launch(self, stream: Any = None) -> None:
        cupy = self._cupy
        machine = self._cupy.machine
        cupy.refuse_capture("cudaGraphLaunch")
        handle = cupy.handle((cupy.current() if stream is None else stream).ptr)
        cupy.record.launches["graph"] += 1
        started = Mark()
        marks: dict[Mark, Mark] = {}
        with machine.lock:
            for piece in self._pieces:
                if piece.stream not in self._queues:
                    self._queues[piece.stream] = machine.queue("graph.")
            machine.put(handle, "graph", lambda: setattr(started, "done", True))
            for queue in self._queues.values():
                machine.put(queue, "begins", waits=started)
            for piece in self._pieces:
                queue = self._queues[piece.stream]
                if piece.records is not None:
                    mark = marks[piece.records] = Mark()
                    machine.put(queue, "record", lambda mark=mark: setattr(mark, "done", True))  # type: ignore[misc]
                elif piece.waits is not None:
                    machine.put(queue, "wait", waits=marks[piece.waits])
                else:
                    meeting = None if piece.meet is None else piece.meet()
                    machine.put(queue, piece.kind, piece.run, meeting=meeting)
            for queue in self._queues.values():
                ended = Mark()
                machine.put(queue, "ends", lambda mark=ended: setattr(mark, "done", True))  # type: ignore[misc]
                machine.put(handle, "wait", waits=ended)


class Captures:
    """All captures of one stand-in."""

    def __init__(self, cupy: Cupy, error: Callable[[int, str], Exception]) -> None:
        self._cupy = cupy
        self._error = error
        self._of: dict[int, Sequence] = {}  # by stream
        self.modes: dict[int, int] = {}  # by thread, where it is not a capture's own
        self._marks: dict[Mark, tuple[Sequence, dict[int, int]]] = {}

    def begin(self, stream: int, mode: int | None) -> None:
        if stream in (0, 1, 2) or stream in self._of or not self._cupy.owners.get(stream, 0) >= 0:
            raise self.error(900)
        self._enter(stream, Sequence(stream, RELAXED if mode is None else mode))

    def end(self, stream: int) -> Graph:
        sequence = self._of.get(stream)
        if sequence is None or sequence.origin != stream:
            raise self.error(903)
        if sequence.mode != RELAXED and sequence.thread != threading.get_ident():
            raise self.error(908)
        for each in sequence.reached:
            del self._of[each]
            self._cupy.capturing.discard(each)
        if sequence.broken:
            raise self.error(901)
        last = sequence.reached[stream]
        for each, own in sequence.reached.items():
            if own.get(each, 0) > last.get(each, 0):
                raise self.error(904)
        return Graph(self._cupy, sequence.pieces)

    def takes(self, stream: int) -> bool:
        """Whether a stream is being captured."""
        return stream in self._of

    def add(self, stream: int, kind: str, run: Callable[[], None] | None, meet: Any = None) -> None:
        """Work of a capturing stream."""
        self._of[stream].add(Piece(stream, kind, run, meet=meet))

    def record(self, stream: int, mark: Mark) -> bool:
        """An event is recorded; True if that is captured."""
        sequence = self._of.get(stream)
        if sequence is None:
            return False
        sequence.add(Piece(stream, "record", records=mark))
        self._marks[mark] = sequence, dict(sequence.reached[stream])
        return True

    def wait(self, stream: int, mark: Mark) -> bool:
        """A stream waits for an event; True if that is captured."""
        sequence = self._of.get(stream)
        (source, reached) = self._marks.get(mark, (None, {}))
        if source is None:
            if sequence is None:
                return False
            sequence.broken = True
            raise self.error(905)
        if source not in self._of.values():
            raise self.error(907)
        if sequence is None:
            self._enter(stream, source)
        elif sequence is not source:
            sequence.broken = source.broken = True
            raise self.error(905)
        source.add(Piece(stream, "wait", waits=mark))
        own = source.reached[stream]
        for each, count in reached.items():
            own[each] = max(own.get(each, 0), count)
        return True

    def ask(self, mark: Mark | None) -> None:
        """Somebody asks an event, or waits for it."""
        result = None if mark is None else self._marks.get(mark)
        if result is not None:
            result[0].broken = True
            raise self.error(907)

    def unsafe(self, call: str) -> None:
        """cudaMalloc and its like. Raises: where this thread is in a capture that forbids it, which is broken by it."""
        me = threading.get_ident()
        for each in self._of.values():
            lax = RELAXED in (each.mode, self.modes.get(me))
            if not lax and (each.thread == me or each.mode == GLOBAL):
                each.broken = True
                raise self.error(900, call)

    def exchange(self, mode: Any) -> int:
        """cuThreadExchangeStreamCaptureMode, which gets a pointer to the new mode and leaves the old one there."""
        me = threading.get_ident()
        cell = mode._obj
        before = self.modes.get(me, GLOBAL)
        self.modes[me] = cell.value
        cell.value = before
        return 0

    def error(self, code: int, what: str = "") -> Exception:
        return self._error(code, f"{_WHY[code]}{f' ({what})' if what else ''}")

    def _enter(self, stream: int, sequence: Sequence) -> None:
        self._of[stream] = sequence
        sequence.reached.setdefault(stream, {})
        self._cupy.capturing.add(stream)


def install(gpu: Any, monkeypatch: Any) -> None:
    """Puts the driver's function that CuPy does not have in its place; says which files are the stand-in's."""
    files = [str(each) for each in Path(__file__).parent.glob("*.py") if not each.name.startswith("test_")]
    monkeypatch.setattr(_graphed_step, "_libraries", lambda: [*files, str(Path(np.__file__).parent)])
    monkeypatch.setattr(capture, "_exchange", lambda: gpu.cupy.captures.exchange)
