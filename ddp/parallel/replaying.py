"""A captured backward: a CUDA graph reduces the buckets again, and the ranks still tell each other what they agreed on.

Weights and used parameters were exchanged when the step was captured, and are constants of the graph. At every replay
the control message goes all the same, over the host's transport and without waiting: it is read before the next
replay, so one step late. Wishes (to stop, to save) are heard by it. If the ranks say something else than they did at
the capture, the step before has been applied with a mean that is not theirs: every rank raises, and none goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives import Communicator
from collectives.flight.recorder import process_recorder
from ddp.errors import ParallelError
from ddp.parallel.control import ControlMessage
from ddp.parallel.naming import naming
from ddp.parallel.wishes import Wishes


class Replayed:
    """The synchronized backward of one captured step.

    control: what the ranks said at the capture; names: of the parameters; counted: called for each replay that was
    launched
    """

    def __init__(
        self,
        comm: Communicator,
        control: ControlMessage,
        weight: float | None,
        used: Sequence[bool],
        names: Sequence[str],
        wishes: Wishes,
        counted: Callable[[], int],
    ) -> None:
        self._comm, self._weight, self._used, self._names, self._wishes = comm, weight, list(used), names, wishes
        self._counted = counted
        self._said = control.agreement()
        self._message = control.another()
        self._under_way = False
        self._step = 0

    def before(self) -> None:
        """Before a launch: hears of the one before, and says the same again. Raises: ParallelError."""
        self.hear()
        self._message.send(self._weight, self._used, wished=self._wishes.mine)
        self._under_way = True

    def after(self) -> None:
        """After a launch."""
        self._step = self._counted()
        process_recorder().count_backwards(self._step)
        self._comm.watch_device("graph")

    def hear(self) -> None:
        """Reads what the ranks said at the last launch, if that was not done.

        Raises: ParallelError, on every rank alike, if it is not what they said at the capture; what ended the message.
        """
        if not self._under_way:
            return
        self._under_way = False
        with naming(f"replay {self._step}: the control message"):
            self._message.wait()
        self._wishes.hear(self._message.wishes())
        now = self._message.agreement()
        if np.array_equal(now, self._said):
            return
        pairs = zip(self._names, now[-len(self._names) :] != self._said[-len(self._names) :], strict=True)
        used = [name for name, differs in pairs if differs]
        what = f"used {', '.join(used[:4])}, or did not, unlike" if used else "gave other weights than"
        raise ParallelError(
            f"rank {self._comm.rank}: in step {self._step}, which was replayed from a CUDA graph, ranks {what} when it "
            "was captured. That step has been applied with the mean of the capture: go back to a checkpoint, and go on "
            "without graphed_step. Weights and used parameters are constants of a graph, on every rank alike"
        )
