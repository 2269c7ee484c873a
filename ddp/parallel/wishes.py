"""What a rank wishes that all ranks do after this step: to stop, to save. It rides in the control message.

A signal reaches one rank, at any moment, and ranks that do not act after the same step wait for each other for ever.
After a synchronized backward all ranks know the same wishes, for a few numbers in a message that goes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

STOP, SAVE, SAVED = range(3)
KINDS = 3


class Wishes:
    """This rank's wishes, and what has been heard of all ranks'.

    mine: may be set at any time, by a signal handler too; it goes with the next synchronized backward
    heard: how many ranks said each in one message, at most, since `forget`
    """

    def __init__(self) -> None:
        self.mine = [False] * KINDS
        self.heard = [0] * KINDS

    def hear(self, counts: Sequence[int]) -> None:
        """A message has come."""
        self.heard = [max(pair) for pair in zip(self.heard, counts, strict=True)]

    def forget(self) -> None:
        """What was heard has been acted upon."""
        self.heard = [0] * KINDS
