"""NaN in one rank's gradient is NaN in every rank's after the sum: this check says where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from ddp.errors import ParallelError
from ddp.parallel.checks.arriving import Arriving

Array = Any


class FiniteCheck:
    """Looks at each gradient before it is reduced; costs a pass over it, and one small call when backward ends.

    On a GPU it costs the host its lead besides: when backward ends it waits until the device has got there.
    """

    def __init__(self, comm: Communicator, names: Sequence[str]) -> None:
        self._comm = comm
        self._names = names
        self._xp: Any = np
        self._found: list[tuple[int, Array]] = []

    def begin(self) -> None:
        """A backward begins; what one that failed found is of no use any more."""
        self._found = []

    def look(self, index: int, gradient: Array, xp: Any) -> None:
        """Looks at this rank's gradient of one parameter, without waiting for a device."""
        self._found.append((index, xp.isfinite(gradient).all()))
        self._xp = xp

    def finish(self, step: int) -> None:
        """Has the ranks tell each other. Collective.

        Raises: ParallelError on every rank, with the first such parameter of each rank.
        """
        first = -1
        if self._found:
            well = Arriving(self._xp.stack([each for _, each in self._found]), self._xp).read()
            first = next((index for (index, _), is_well in zip(self._found, well, strict=True) if not is_well), -1)
        firsts = self._comm.all_gather(np.array([first]), lengths="equal").tolist()
        bad = [f"{self._names[index]} on rank {rank}" for rank, index in enumerate(firsts) if index >= 0]
        if bad:
            raise ParallelError(
                f"step {step}: infinity or NaN in the gradient of {', '.join(bad)}, before it was reduced"
            )
