"""The control message: what ranks must agree on, once for each synchronized backward.

Nothing rides inside a gradient, because hooks may round, drop or shard one. The message is float64 and summed over the
ranks; it is launched before the first bucket, so the total weight is known when the first sum is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_WEIGHT, _WEIGHTED, _USED = 0, 1, 2


class ControlMessage:
    """The message of one model.

    array: (2 + parameters,) float64: the weight, whether a weight was given, and one used bit a parameter. After the
    sum over ranks: the total weight, how many ranks gave one, and how many ranks used each parameter.
    """

    def __init__(self, parameters: int) -> None:
        self.array: Array = np.zeros(_USED + parameters)

    def fill(self, weight: float | None, used: Sequence[bool]) -> None:
        """Writes what this rank has to say; a rank without a weight counts as 1."""
        self.array[_WEIGHT] = 1.0 if weight is None else weight
        self.array[_WEIGHTED] = weight is not None
        self.array[_USED:] = used

    def scale(self) -> float:
        """What makes of the sum of gradients their mean. Where nobody had any weight there is no gradient: 0."""
        total = float(self.array[_WEIGHT])
        return 1.0 / total if total != 0.0 else 0.0

    def weighted_ranks(self) -> int:
        """How many ranks gave a weight."""
        return int(self.array[_WEIGHTED])

    def used(self) -> list[bool]:
        """Whether any rank used each parameter."""
        flags: list[bool] = (self.array[_USED:] > 0).tolist()
        return flags
