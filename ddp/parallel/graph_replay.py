"""Replays of a captured backward: a CUDA graph reduces the buckets again, and ranks still exchange control messages.

Weights and used parameters were exchanged when the step was captured, and are constants of the graph. At every replay
the control message goes all the same, over the host's transport and without waiting: it is read before the next replay,
so one step late. Requests (to stop, to save) arrive with it. If the ranks send another one than at the capture, the
step before has been applied with a wrong mean: every rank raises, and none continues.

All that the reducer has to do in a capture is here; without one, these methods do next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddp._device import capturing
from ddp.errors import ParallelError
from ddp.parallel.error_context import error_context

if TYPE_CHECKING:
    from ddp.parallel.reducer import Reducer


class GraphReplays:
    """The captured backwards of one model."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._last: _ReplayedBackward | None = None  # the one whose message was sent last

    def begin(self) -> None:
        """A backward begins: reads the message of the last replay. Raises: ParallelError; see the module."""
        if self._last is not None:
            self._last.receive()
        if (graph := capturing.now) is None:
            return
        reducer, gradients = self._reducer, self._reducer.gradients
        before = gradients.snapshot()

        def undo() -> None:
            gradients.restore(before)
            reducer.running = reducer.in_flight = False

        graph.fix(lambda: (reducer.sync, gradients.weights))
        graph.undo(undo)

    def end(self, weight: float | None) -> bool:
        """A backward has ended: if it was captured, registers what every launch of the graph needs, and returns True.

        weight: of a synchronized backward, on this rank
        """
        if (graph := capturing.now) is None:
            return False
        reducer = self._reducer
        if reducer.sync:
            buckets, replayed = reducer.buckets, _ReplayedBackward(reducer, weight)

            def before() -> None:
                reducer.check_usable()
                if self._last is not None:
                    self._last.receive()
                self._last = replayed
                replayed.send()

            def after() -> None:
                replayed.step = reducer.count_step()
                reducer.comm.watch_device("graph")

            graph.fix(lambda: reducer.buckets is buckets)
            graph.before(before)
            graph.after(after)
            graph.keep(buckets)
        weights = reducer.gradients.weights  # what has been accumulated after each launch
        graph.after(lambda: setattr(reducer.gradients, "weights", weights))
        return True


class _ReplayedBackward:
    """The synchronized backward of one captured step."""

    def __init__(self, reducer: Reducer, weight: float | None) -> None:
        self.step = 0
        self._reducer, self._weight, self._used = reducer, weight, list(reducer.used)
        self._captured = reducer.control.agreement()
        self._message = reducer.control.clone()
        self._in_flight = False

    def send(self) -> None:
        self._message.send(self._weight, self._used, requests=self._reducer.requests.mine)
        self._in_flight = True

    def receive(self) -> None:
        if not self._in_flight:
            return
        self._in_flight = False
        with error_context(f"replay {self.step}: the control message"):
            self._message.wait()
        self._reducer.requests.receive(self._message.requests())
        now, names = self._message.agreement(), self._reducer.names
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
