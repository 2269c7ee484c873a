"""Which indices make which batch of one pass, and where the sampler is after each: what is handed out counts, not what
has been read ahead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

State = dict[str, Any]


class Course:
    """The pass that begins now of a sampler of batches, or of indices where nothing is put together.

    skipped: batches to leave out, where the sampler cannot be told where to go on
    """

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._counts = hasattr(sampler, "state_after")
        self._stateful = hasattr(sampler, "state_dict")
        self._states: deque[State] = deque()  # after each batch that was read ahead, where the sampler keeps no count
        indices = iter(sampler)
        self._began = sampler.state_dict() if self._stateful else None
        if not self._stateful:
            indices = itertools.islice(indices, skipped, None)
        self._indices: Iterator[Any] = indices
        self._read = self._handed = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The indices of the next batch."""
        indices = next(self._indices)
        self._read += 1
        if self._stateful and not self._counts:
            self._states.append(self._sampler.state_dict())
        return indices

    def hand_out(self) -> None:
        """The consumer has got one more batch."""
        self._handed += 1
        if self._states:
            self._began = self._states.popleft()

    def leave(self, failed: bool) -> bool:
        """The pass is not gone on with. True if all of it was handed out; else the sampler begins it again.

        Where everything that was read was handed out, the sampler is asked whether it has more: only at its end does it
        count an epoch, and the ranks, and workers that read ahead, would come there at different times.

        failed: there was an error, and not the end
        """
        if not failed and self._read == self._handed and self._over():
            return True
        # A batch sampler of somebody else's holds the sampler of this rank as ours does.
        for each in (self._sampler, getattr(self._sampler, "sampler", None)):
            begin_again: Any = getattr(each, "begin_again", None)
            if begin_again is not None:
                begin_again()
        return False

    def _over(self) -> bool:
        try:
            ahead = list(itertools.islice(self._indices, 1))
        except Exception:  # of a sampler, which nobody has asked for more: it is no end
            return False
        self._indices = itertools.chain(ahead, self._indices)  # whoever still has this pass may go on
        return not ahead

    def state(self) -> State | None:
        """The sampler's, after what was handed out; None where it has none."""
        if self._counts:
            after: State = self._sampler.state_after(self._began, self._handed)
            return after
        return self._began
