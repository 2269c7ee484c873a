r"""A collective's way between streams: what orders it after the caller's kernels and before those that use its result.

    the caller's stream   ── kernels ── ready ──────────────────────── wait(done) ── kernels ──
                                           \                          /
    communication stream   ───────────── wait(ready) ── collective ── done

The host waits for neither edge. CuPy's memory pool keeps one arena a stream and gives freed memory out again at once,
in that stream's order, which knows nothing of the communication stream. So a result lies in the arena of the caller's
stream and `ready` stands behind its allocation; everything that the communication stream touches is held in custody
until `done` has passed; and what it makes for itself lies in its own arena and is used by no other stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from collectives._gpu.cuda import Cuda
from collectives.errors import ArgumentError

_LOOK = 1e-3  # s; how long a finished collective may keep its buffers
_IDLE = 5.0  # s; without anything to hold, until the thread that looks ends


class Custody:
    """Holds what streams still use, each until its event has passed."""

    def __init__(self, passed: Callable[[Any], bool]) -> None:
        self._passed = passed
        self._changed = threading.Condition()
        self._held: list[tuple[Any, Any]] = []
        self._for_ever: list[Any] = []
        self._thread: threading.Thread | None = None

    def hold(self, event: Any, things: Any) -> None:
        """Keeps `things` until `event` has passed."""
        with self._changed:
            self._held.append((event, things))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="collectives-custody", daemon=True)
                self._thread.start()
            self._changed.notify()

    def hold_for_ever(self, things: Any) -> None:
        """Keeps what a captured graph may use whenever it is launched: its events must not be asked."""
        self._for_ever.append(things)

    def holds(self) -> int:
        """How many collectives' things are held, those of graphs left out."""
        with self._changed:
            return len(self._held)

    def sweep(self) -> None:
        """Lets go of what no stream uses any more."""
        with self._changed:
            held = list(self._held)
        over = []
        for pair in held:
            try:
                if self._passed(pair[0]):
                    over.append(pair)
            except Exception:
                # The device has failed, and who waits for the collective hears of it; whether this memory is still
                # written to, nobody knows.
                self._for_ever.append(pair)
                over.append(pair)
        gone = {id(pair) for pair in over}
        with self._changed:
            self._held = [pair for pair in self._held if id(pair) not in gone]

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._held), _IDLE):
                    self._thread = None
                    return
            self.sweep()
            time.sleep(_LOOK)


class Passage:
    """The edges and the buffers of one collective. Made in the caller's thread, on the caller's current stream."""

    def __init__(self, cuda: Cuda, custody: Custody, *things: Any) -> None:
        self._cuda = cuda
        self._custody = custody
        self._origin = cuda.current_stream()
        self._kept = list(things)
        self._ready: Any = None
        self._comm: Any = None
        self._done: Any = None
        self.captured = cuda.capturing(self._origin)

    def room(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array for the caller, in the arena of the caller's stream; before or after `enter`."""
        if self._ready is not None and self._cuda.is_per_thread(self._origin):
            raise ArgumentError(
                "the result's shape has to be exchanged first, and another thread cannot make an array in the order of "
                "this thread's own default stream: give lengths, or call it under a cupy.cuda.Stream"
            )
        with self._cuda.on(self._origin):
            array = self._cuda.empty(shape, dtype)
        if self._ready is not None:
            # What was freed since `ready` may lie here, and kernels of the caller's may still use it.
            self._comm.wait_event(self._cuda.mark(self._origin))
        self.keep(array)
        return array

    def keep(self, *things: Any) -> None:
        """Holds these until the collective is done."""
        self._kept.extend(things)

    def enter(self) -> None:
        """Compute before communication: the collective will come after all that the caller's stream has now."""
        self._ready = self._cuda.mark(self._origin)

    def begin(self, comm: Any) -> None:
        """Has the communication stream wait for `ready`; in whichever thread drives the collective."""
        assert self._ready is not None
        self._comm = comm
        comm.wait_event(self._ready)

    def end(self) -> Any:
        """Everything has been put on the communication stream. Returns the event behind it."""
        try:
            self._done = self._cuda.mark(self._comm)
        except Exception:
            self._custody.hold_for_ever(self._kept)  # the device has failed: nobody knows what is still written to
            raise
        if self.captured:
            self._custody.hold_for_ever(self._kept)
        else:
            self._custody.hold(self._done, self._kept)
        self._kept = []
        return self._done

    def leave(self) -> None:
        """Communication before compute: what the calling thread's current stream does next may use the result."""
        self._cuda.current_stream().wait_event(self._done)
