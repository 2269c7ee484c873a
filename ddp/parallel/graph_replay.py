"""Replays of a captured backward: a CUDA graph reduces the buckets again, and ranks still exchange control messages.

Weights and used parameters were exchanged when the step was captured, and are constants of the graph. Every replay
sends the control message nevertheless, over the host's transport and without waiting for it. The message is read before
the next replay or backward, one step late, with its requests (to stop, to save). If its weights or used parameters
differ from those of the capture, the replayed step was applied with a wrong mean, and every rank raises.

How a replay changes the reducer's own state is registered in `Reducer._begin_capture` and `Reducer._end_capture`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ddp.errors import ParallelError
from ddp.parallel.error_context import error_context

if TYPE_CHECKING:
    from ddp.parallel.reducer import Reducer


class GraphReplays:
    """The captured backwards of one model."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._last: _ReplayedBackward | None = None  # the backward whose message was sent last

    def begin(self) -> None:
        """Called before a backward or a replay. Reads the message of the last replay.

        Raises: ParallelError if weights or used parameters of that replay were not those of the capture.
        """
        if self._last is not None:
            self._last.receive()

    def register(self, graph: Any, weight: float | None) -> None:
        """Registers what each launch of `graph`, which contains a synchronized backward, does on the host.

        weight: of that backward, on this rank
        """
        reducer = self._reducer
        buckets = reducer.buckets
        backward = _ReplayedBackward(reducer, weight)

        def before() -> None:
            reducer.check_usable()
            self.begin()
            self._last = backward
            backward.send()

        def after() -> None:
            backward.step = reducer.count_step()
            reducer.comm.watch_device("graph")

        graph.guard_value(lambda: reducer.buckets is buckets)
        graph.before(before)
        graph.after(after)
        graph.keep_alive(buckets)


class _ReplayedBackward:
    """The synchronized backward of one captured step."""

    def __init__(self, reducer: Reducer, weight: float | None) -> None:
        self.step = 0
        self._reducer = reducer
        self._weight = weight
        self._used = list(reducer.used)
        self._captured = reducer.control.agreement()
        self._message = reducer.control.clone()
        self._in_flight = False

    def send(self) -> None:
        self._message.send(self._weight, self._used, requests=self._reducer.requests.requested)
        self._in_flight = True

    def receive(self) -> None:
        if not self._in_flight:
            return
        self._in_flight = False
        with error_context(f"replay {self.step}: the control message"):
            self._message.wait()
        self._reducer.requests.receive(self._message.requests())
        now = self._message.agreement()
        names = self._reducer.names
        if np.array_equal(now, self._captured):
            return
        pairs = zip(names, now[-len(names) :] != self._captured[-len(names) :], strict=True)
        used = [name for name, differs in pairs if differs]
        what = f"used {', '.join(used[:4])}, or did not, unlike" if used else "gave other weights than"
        raise ParallelError(
            f"rank {self._reducer.comm.rank}: in step {self.step}, which was replayed from a CUDA graph, ranks {what} "
            "when it was captured. That step has been applied with the mean of the capture: go back to a checkpoint, "
            "and go on without graphed_step. Weights and used parameters are constants of a graph, on every rank alike"
        )
