"""Who has left the job: a rank that waits must learn that the one it waits for will never come.

A leaving rank tells every other its exit status and how many calls it made on each communicator. The count is what
makes the answer exact: a rank that took part in call #5 and left is no reason to give up call #5, which may still be
waiting for a slow rank; one that left before call #5 is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectives.world import STOPPED

#: The exit status of a rank that ended without a word: killed, or by os._exit.
LOST = -1


@dataclass(frozen=True, kw_only=True)
class ExitNotice:
    """What a rank says when it leaves. status: its exit status; calls: communicator → number of calls it made."""

    status: int
    calls: Mapping[str, int]

    @property
    def failed(self) -> bool:
        """True if this rank did not leave in order."""
        return not is_clean(self.status)

    def encode(self) -> bytes:
        """This notice as JSON."""
        return json.dumps({"status": self.status, "calls": dict(self.calls)}).encode()

    @staticmethod
    def decode(message: bytes) -> ExitNotice:
        """The notice that `encode` wrote."""
        read = json.loads(message)
        return ExitNotice(status=read["status"], calls=read["calls"])


def is_clean(status: int) -> bool:
    """True for the exit status of a rank that has done its work, or has stopped as it was asked to.

    >>> [in_order(status) for status in (0, STOPPED, 1, 143)]
    [True, True, False, False]
    """
    return status in (0, STOPPED)


def left_before(exit_notices: Mapping[int, ExitNotice], communicator: str, number: int) -> list[int]:
    """The ranks that left before making call `number` (counted from 0) on that communicator, in rank order.

    A rank that failed counts whatever it made: it may have died with calls queued, and the job is lost anyway.
    """
    return sorted(
        rank for rank, left in exit_notices.items() if left.failed or left.calls.get(communicator, 0) <= number
    )


def among(members: Sequence[int], exit_notices: Mapping[int, ExitNotice]) -> dict[int, ExitNotice]:
    """The exit notices by rank in a communicator. members: the ranks of the world that are in it, in its order"""
    return {rank: exit_notices[member] for rank, member in enumerate(members) if member in exit_notices}


def describe(exit_notices: Mapping[int, ExitNotice], ranks: list[int]) -> str:
    """`rank 1 has left (exit status 0)`, for one rank or several."""
    said = [f"rank {rank} has {_how(exit_notices[rank].status)}" for rank in ranks]
    return said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]


def _how(status: int) -> str:
    if status == LOST:
        return "ended without leaving (killed?)"
    if status == STOPPED:
        return f"stopped as asked (exit status {status})"
    return "left (exit status 0)" if status == 0 else f"failed (exit status {status})"
