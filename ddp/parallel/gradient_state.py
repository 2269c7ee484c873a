"""The state of a model's gradients between two backwards: empty, accumulated on this rank, or a mean over ranks.

`WeightSum` holds the sum of the weights of this rank's accumulated backwards. The mean is divided by the total of these
sums over all ranks. `GradientState` holds the state of each gradient. A weight belongs to the backward that runs, not
to a model: if one backward passes through two wrapped models, both count it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp._engine import Leaf
from ddp._engine.grad_buffer import EMPTY, FULL
from ddp._tensor.core import Tensor
from ddp.errors import ParallelError

# `_current.weight` is the weight of the backward that runs in this thread. It is None or missing without a weight.
_current = threading.local()


@contextlib.contextmanager
def backward_weight(weight: float) -> Iterator[None]:
    """Gives the backwards of this thread a weight while the context lasts."""
    before = getattr(_current, "weight", None)
    _current.weight = weight
    try:
        yield
    finally:
        _current.weight = before


@dataclass(frozen=True, kw_only=True)
class WeightSum:
    """The backwards of one model whose gradients were accumulated and are not reduced yet.

    weight: the sum of their weights, None if they had none; passes: their number
    reached: whether one of them reached a parameter
    """

    weight: float | None = None
    passes: int = 0
    reached: bool = False

    def add(self, weight: float | None, reaches: bool, empty: bool) -> WeightSum:
        """Returns the sum including the backward that starts now.

        weight: of the new backward; reaches: whether it reaches a parameter
        empty: whether the model holds no gradient. If it holds none although an earlier backward reached a parameter,
        the gradients were discarded, and the earlier backwards do not count

        Raises: ParallelError if some of the accumulated backwards have a weight, and others have none.
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
    """For each parameter: whether it holds a gradient, and whether that is a mean over ranks already.

    A mean over ranks is not reduced again if its parameter was already frozen when the accumulation began, is still
    frozen, and the backward does not reach it. A gradient that a frozen parameter has when the model is wrapped counts
    as a mean over ranks.
    """

    def __init__(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> None:
        self.weights = WeightSum()
        self.excluded: set[int] = set()  # the parameters that this backward does not reduce again
        self._leaves = leaves
        self.tensors = tensors
        # Whether the grad_buffer holds a mean over ranks.
        self._reduced = [
            leaf.grad_buffer.full and not tensor.requires_grad for leaf, tensor in zip(leaves, tensors, strict=True)
        ]
        # Indices of the parameters that were trainable when the accumulation began. Some ranks may have added to these
        # gradients in a backward inside no_sync(). So all ranks reduce these gradients again, even of parameters that
        # have been frozen since.
        self._trainable: set[int] = set()

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that a later backward is to reduce."""
        return self.weights.reached and self.any()

    def snapshot(self) -> tuple[WeightSum, list[bool]]:
        """Copies the state, for `restore`."""
        return self.weights, list(self._reduced)

    def restore(self, snapshot: tuple[WeightSum, list[bool]]) -> None:
        """Returns to the state of a snapshot."""
        self.weights = snapshot[0]
        self._reduced = list(snapshot[1])

    def begin(self, reached: set[int]) -> None:
        """Starts a backward that will reach these parameters. Finds the means that it does not reduce again."""
        for index, leaf in enumerate(self._leaves):
            if leaf.grad_buffer.state is not FULL:
                self._reduced[index] = False
        if self.weights.passes == 0:
            self._trainable = {index for index, tensor in enumerate(self.tensors) if tensor.requires_grad}
        touched = reached | self._trainable
        self.excluded = {
            index
            for index, reduced in enumerate(self._reduced)
            if reduced and index not in touched and not self.tensors[index].requires_grad
        }

    def has(self, index: int) -> bool:
        """Whether the parameter holds a gradient that is to be reduced."""
        return self._leaves[index].grad_buffer.full and index not in self.excluded

    def any(self) -> bool:
        """Whether any parameter holds a gradient to reduce. Zeros that `zero_grad` wrote do not count."""
        return any(self.has(index) and leaf.grad_buffer.state is FULL for index, leaf in enumerate(self._leaves))

    def add_weight(self, reaches: bool, names: Sequence[str]) -> None:
        """Adds the weight of the backward that starts. reaches: whether it reaches a parameter

        Raises: ParallelError if only some of the accumulated backwards have a weight, or if one with a weight would add
        to means over ranks.
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
        """Index of the first parameter whose mean this backward would add to or reduce again. None if there is none."""
        means = (index for index, reduced in enumerate(self._reduced) if reduced and index not in self.excluded)
        return next(means, None)

    def end(self, index: int, by_any: bool) -> None:
        """Records that a parameter's grad_buffer holds a mean, or nothing, after a synchronized backward.

        by_any: whether any rank had a gradient; if so, the grad_buffer's memory holds the mean, or under a
        ZeroOptimizer this rank's sum
        """
        if by_any or index not in self.excluded:
            self._leaves[index].grad_buffer.state = FULL if by_any else EMPTY
            self._reduced[index] = by_any
