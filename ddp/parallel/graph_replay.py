"""Replays of a captured backward: a CUDA graph reduces the buckets again, and ranks still exchange control messages.

Weights and used parameters were exchanged when the step was captured, and are constants of the graph. At every replay
the control message goes all the same, over the host's transport and without waiting: it is read before the next replay,
so one step late. Requests (to stop, to save) arrive with it. If the ranks say something else than they did at the
capture, the step before has been applied with a wrong mean: every rank raises, and none continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.flight.recorder import process_recorder
from ddp.errors import ParallelError
from ddp.parallel.buckets import Buckets
from ddp.parallel.control import ControlMessage, PendingRequests
from ddp.parallel.error_context import error_context


class GraphReplays:
    """The captured backwards of one model.

    names: of the parameters; check: called before each replay, may raise; count: counts a replay, returns its number
    """

    def __init__(
        self, comm: Communicator, names: Sequence[str], check: Callable[[], None], count: Callable[[], int]
    ) -> None:
        self._comm, self._names, self._check, self._count = comm, names, check, count
        self._last: _ReplayedBackward | None = None  # the one whose message was sent last

    def receive(self) -> None:
        """Reads the message of the last replay, if that was not done. Raises: ParallelError; see the module."""
        if self._last is not None:
            self._last.receive()

    def capture(
        self,
        graph: Any,
        buckets: Buckets,
        control: ControlMessage,
        weight: float | None,
        used: Sequence[bool],
        requests: PendingRequests,
    ) -> None:
        """A synchronized backward has been captured: registers what every launch of the graph needs.

        control, weight, used: its control message, and this rank's part of it
        """
        replayed = _ReplayedBackward(self._comm, control, weight, used, self._names, requests)

        def before() -> None:
            self._check()
            self.receive()
            self._last = replayed
            replayed.send()

        def after() -> None:
            replayed.step = self._count()
            process_recorder().count_backwards(replayed.step)
            self._comm.watch_device("graph")

        graph.before(before)
        graph.after(after)
        graph.keep(buckets)


class _ReplayedBackward:
    """The synchronized backward of one captured step. control: the message as it was at the capture"""

    def __init__(
        self,
        comm: Communicator,
        control: ControlMessage,
        weight: float | None,
        used: Sequence[bool],
        names: Sequence[str],
        requests: PendingRequests,
    ) -> None:
        self.step = 0
        self._comm, self._weight, self._used, self._names, self._requests = comm, weight, list(used), names, requests
        self._captured = control.agreement()
        self._message = control.clone()
        self._in_flight = False

    def send(self) -> None:
        self._message.send(self._weight, self._used, requests=self._requests.mine)
        self._in_flight = True

    def receive(self) -> None:
        if not self._in_flight:
            return
        self._in_flight = False
        with error_context(f"replay {self.step}: the control message"):
            self._message.wait()
        self._requests.receive(self._message.requests())
        now = self._message.agreement()
        if np.array_equal(now, self._captured):
            return
        count = len(self._names)
        pairs = zip(self._names, now[-count:] != self._captured[-count:], strict=True)
        used = [name for name, differs in pairs if differs]
        what = f"used {', '.join(used[:4])}, or did not, unlike" if used else "gave other weights than"
        raise ParallelError(
            f"rank {self._comm.rank}: in step {self.step}, which was replayed from a CUDA graph, ranks {what} when it "
            "was captured. That step has been applied with the mean of the capture: go back to a checkpoint, and go on "
            "without graphed_step. Weights and used parameters are constants of a graph, on every rank alike"
        )
