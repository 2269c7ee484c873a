"""What the gradients of a model are between two backwards: empty, added up on this rank, or already a mean over ranks.

`WeightSum` holds what a mean over ranks and accumulation steps is divided by, `GradientState` what each gradient is.
The weight belongs to the backward that runs, not to a model: where one backward passes through two wrapped models, both
count it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp._engine import Leaf
from ddp._tensor.core import Tensor
from ddp.errors import ParallelError

_current = threading.local()  # `weight`: of the backward that runs in this thread


@contextlib.contextmanager
def backward_weight(weight: float) -> Iterator[None]:
    """Backwards of this thread inside count `weight`."""
    before, _current.weight = getattr(_current, "weight", None), weight
    try:
        yield
    finally:
        _current.weight = before


@dataclass(frozen=True, kw_only=True)
class WeightSum:
    """The backwards of one model that have been accumulated and not reduced.

    weight: the sum of their weights, None if they had none; passes: how many they are
    reached: one of them reached a parameter
    """

    weight: float | None = None
    passes: int = 0
    reached: bool = False

    def add(self, weight: float | None, reaches: bool, empty: bool) -> WeightSum:
        """The sum with the backward that starts now.

        weight: that of the new backward; reaches: it reaches a parameter
        empty: the model holds no gradient, so what earlier backwards left was thrown away and does not count

        Raises: ParallelError if it has a weight and the others have none, or the other way round.
        """
        if self.reached and empty:
            return WeightSum().add(weight, reaches, empty)
        if self.passes > 0 and (weight is None) != (self.weight is None):
            raise ParallelError(
                "backward with and without a weight cannot be accumulated together: use "
                "model.backward(loss, weight=...) for all of them, or for none"
            )
        total = None if weight is None else (self.weight or 0.0) + weight
        return WeightSum(weight=total, passes=self.passes + 1, reached=self.reached or reaches)


class GradientState:
    """For each parameter: does it hold a gradient, and is that already a mean over ranks?

    Excluded from a backward is a gradient that was reduced before its parameter was frozen: it stays as it is until the
    parameter is used again. So is the gradient of a parameter that was frozen when the model was wrapped.
    """

    def __init__(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> None:
        self.weights = WeightSum()
        self.excluded: set[int] = set()  # in this backward
        self._leaves, self.tensors = leaves, tensors
        # The grad_buffer holds a mean over ranks to which no backward has added since.
        self._reduced = [
            leaf.grad_buffer.full and not tensor.requires_grad for leaf, tensor in zip(leaves, tensors, strict=True)
        ]

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that a later backward is to reduce."""
        return self.weights.reached and self.any()

    def snapshot(self) -> tuple[WeightSum, list[bool]]:
        """What `restore` goes back to."""
        return self.weights, list(self._reduced)

    def restore(self, snapshot: tuple[WeightSum, list[bool]]) -> None:
        """Undoes what was recorded since a snapshot."""
        self.weights, self._reduced = snapshot[0], list(snapshot[1])

    def begin(self, reached: set[int]) -> None:
        """A backward starts that will reach these parameters."""
        for index, leaf in enumerate(self._leaves):
            if not leaf.grad_buffer.full or leaf.grad_buffer.zeroed:
                self._reduced[index] = False
        self.excluded = {
            index
            for index, reduced in enumerate(self._reduced)
            if reduced and index not in reached and not self.tensors[index].requires_grad
        }

    def has(self, index: int) -> bool:
        """The parameter holds a gradient that is to be reduced."""
        return self._leaves[index].grad_buffer.full and index not in self.excluded

    def any(self) -> bool:
        """Some parameter does, and it is more than the zeros that `zero_grad` writes."""
        return any(self.has(index) and not leaf.grad_buffer.zeroed for index, leaf in enumerate(self._leaves))

    def add_weight(self, reaches: bool, names: Sequence[str]) -> None:
        """Counts the backward that starts, with its weight. reaches: it reaches a parameter

        Raises: ParallelError if the weight fits no earlier one, or gradients that are means already.
        """
        weight = getattr(_current, "weight", None)
        self.weights = self.weights.add(weight, reaches=reaches, empty=not self.any())
        mean = self.first_mean()
        if weight is not None and mean is not None:
            raise ParallelError(
                f"backward with a weight would add to {names[mean]}.grad, which is already a mean over ranks: call "
                "zero_grad() before it, or accumulate inside no_sync()"
            )

    def first_mean(self) -> int | None:
        """The first parameter whose gradient is a mean over ranks already, and would be added to."""
        return next((at for at, reduced in enumerate(self._reduced) if reduced and at not in self.excluded), None)

    def end(self, index: int, by_any: bool) -> None:
        """The backward has ended. by_any: some rank had a gradient of this parameter, and its mean is there now."""
        if by_any or index not in self.excluded:
            grad_buffer = self._leaves[index].grad_buffer
            grad_buffer.full, grad_buffer.zeroed, self._reduced[index] = by_any, False, by_any
