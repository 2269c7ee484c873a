"""GPUs without a GPU: streams as queues whose work is done later, in a random order among all that CUDA allows.

What a program may rely on between streams is the order that events give, and nothing else. So a stream's work waits in
a queue, and whenever the host asks something (an event, a synchronization) a few pieces of work from any streams are
done, by dice. A stream may lag behind for as long as it likes. An edge that is missing then gives wrong numbers, in
one seed or another.

Memory is CuPy's: one arena a stream, and what is freed is given out again at once in that stream's order. Here somebody
always takes it at once: freeing puts a piece of work on the arena's stream that scribbles over the memory.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

GARBAGE = 0xA5
_PATIENCE = 20.0  # s; how long a synchronization waits for other ranks' threads
_ONLOOKERS = ("collectives-watchdog",)  # threads that look, and do not drive


class Mark:
    """One recording of an event."""

    def __init__(self) -> None:
        self.done = False


class Meeting:
    """One collective of several streams: its work is done when all of them have come to it."""

    def __init__(self, size: int, work: Callable[[dict[int, Any]], None]) -> None:
        self.size = size
        self.work = work
        self.brought: dict[int, Any] = {}
        self.queues: list[Queue] = []


class Piece:
    """One piece of work on a stream."""

    def __init__(self, kind: str, run: Callable[[], None] | None, waits: Mark | None, meeting: Meeting | None) -> None:
        self.kind = kind
        self.run = run
        self.waits = waits
        self.meeting = meeting


class Queue:
    """A stream's work that is not done yet. pace: how eager the dice make it; arena: freed memory by size"""

    def __init__(self, name: str, pace: float) -> None:
        self.name = name
        self.pace = pace
        self.pieces: deque[Piece] = deque()
        self.added = 0
        self.finished = 0


class Machine:
    """The devices of all ranks, under one lock.

    eager: everything is done as soon as it is queued, for ranks in processes of their own
    before: called with a stream's handle before its next work is done, when eager; returns True
    log: what was put on streams, as (stream, what) in the order of the calls, and what the host waited for
    """

    def __init__(self, seed: int = 0, eager: bool = False) -> None:
        self.dice = random.Random(seed)
        self.eager = eager
        self.before: Callable[[int], bool] | None = None
        self.lock = threading.RLock()
        self.log: list[tuple[str, str]] = []
        self.queues: dict[int, Queue] = {}
        self._busy = False
        self._over = False
        self.memory: list[Any] = []  # nothing is ever given back, so a stray pointer hits garbage and no other process
        self._names: dict[str, int] = {}

    def queue(self, name: str) -> int:
        """A new stream. Returns: its handle."""
        with self.lock:
            number = self._names[name] = self._names.get(name, -1) + 1
            handle = 1000 + len(self.queues)
            pace = self.dice.choice((0.02, 0.3, 1.0))
            self.queues[handle] = Queue(f"{name}{number}" if number else name, pace)
            return handle

    def put(
        self,
        handle: int,
        kind: str,
        run: Callable[[], None] | None = None,
        waits: Mark | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Adds work to a stream."""
        with self.lock:
            queue = self.queues[handle]
            if kind != "free":
                self.log.append((queue.name, kind))
            queue.pieces.append(Piece(kind, run, waits, meeting))
            queue.added += 1
            if meeting is not None:
                meeting.queues.append(queue)
            while self.eager and (self.before is None or self.before(handle)) and self._step():
                pass

    def glance(self, mark: Mark) -> bool:
        """The host asks whether an event has passed; some work may be done meanwhile."""
        with self.lock:
            if self._over:
                return True
            if not threading.current_thread().name.startswith(_ONLOOKERS):
                for _ in range(self.dice.randrange(4)):
                    self._step()
            return mark.done

    def synchronize(self, handle: int, what: str) -> None:
        """The host waits until a stream has done all that it has now."""
        with self.lock:
            queue = self.queues[handle]
            self.log.append((queue.name, what))
            target = queue.added
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self.lock:
                while queue.finished < target and self._step():
                    pass
                if queue.finished >= target:
                    return
            assert time.monotonic() < deadline, f"{queue.name} never gets past {queue.pieces[0].kind}"
            time.sleep(1e-4)

    def settle(self) -> None:
        """Does all work that can be done."""
        with self.lock:
            while self._step():
                pass

    def end(self) -> None:
        """The test is over, and all events have passed: no thread asks for ever for what will never be done."""
        with self.lock:
            self._over = True

    def _step(self) -> bool:
        # What runs may free something, by the garbage collector anything, and who frees may ask for more to be done.
        if self._busy:
            return False
        self._busy = True
        try:
            return self._do()
        finally:
            self._busy = False

    def _do(self) -> bool:
        able = [queue for queue in self.queues.values() if queue.pieces and self._able(queue.pieces[0])]
        if not able:
            return False
        queue = self.dice.choices(able, [each.pace for each in able])[0]
        piece = queue.pieces[0]
        if piece.meeting is not None:
            piece.meeting.work(piece.meeting.brought)
            for each in piece.meeting.queues:
                each.pieces.popleft()
                each.finished += 1
            return True
        if piece.run is not None:
            piece.run()
        queue.pieces.popleft()
        queue.finished += 1
        return True

    @staticmethod
    def _able(piece: Piece) -> bool:
        if piece.waits is not None:
            return piece.waits.done
        if piece.meeting is not None:
            meeting = piece.meeting
            return len(meeting.queues) == meeting.size and all(
                queue.pieces[0].meeting is meeting for queue in meeting.queues
            )
        return True
