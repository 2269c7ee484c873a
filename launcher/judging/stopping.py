"""Whether a job has stopped as it was asked to: ranks that leave with STOPPED have saved what it will go on from.

Pure: how the ranks ended in, words out. That one of them was asked makes no failure; that others went on does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from collectives.world import STOPPED
from launcher.judging.verdict import name_ranks


class Stop(NamedTuple):
    """How a job stopped.

    step: after which it did, None if the ranks did not say so, or not the same
    late: ranks that ended otherwise, in order: they were killed, or crashed on their way
    """

    step: int | None
    late: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The sentence for it.

        >>> print(Stop(120))
        stopped as asked at step 120, state saved: start the same command to go on
        """
        if self.late:
            were = "was" if len(self.late) == 1 else "were"
            return (
                f"{name_ranks(self.late)} {were} ended before all had saved (more time: --grace): start the same "
                "command to go on from the checkpoint before"
            )
        at = "" if self.step is None else f" at step {self.step}"
        return f"stopped as asked{at}, state saved: start the same command to go on"


def stop_of(ends: Mapping[int, int | None], steps: Collection[int] = ()) -> Stop | None:
    """How a job of which all ranks have ended stopped; None if no rank says that it stopped as asked.

    A rank that had done all its work when the others were asked has nothing to save.

    ends: how each rank ended: its exit code, minus the signal that killed it, None where nobody knows
    steps: after which ranks say that they stopped
    """
    if STOPPED not in ends.values():
        return None
    late = tuple(sorted(rank for rank, status in ends.items() if status not in (0, STOPPED)))
    return Stop(next(iter(steps)) if len({*steps}) == 1 else None, late)
