"""What lies in the gradient slots of a model before a backward adds to them."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._engine import Leaf
from ddp._tensor.core import Tensor


class Holdings:
    """The slots of a model's leaves, by index.

    A gradient that has been reduced, and whose parameter was then frozen, is no part of any backward until the
    parameter is used again: it stands aside, and stays as it is. So does what a parameter has that was frozen when the
    model was wrapped.
    """

    def __init__(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> None:
        self.aside: set[int] = set()  # in this backward
        self._leaves, self._tensors = leaves, tensors
        # No backward has added to what the slot holds since it was reduced, or since the model was wrapped.
        self._reduced = [
            leaf.grad_buffer.full and not tensor.requires_grad for leaf, tensor in zip(leaves, tensors, strict=True)
        ]

    @property
    def reduced(self) -> list[bool]:
        """Whose slots hold what was reduced and not added to since; of a copy, which may be put back."""
        return list(self._reduced)

    @reduced.setter
    def reduced(self, value: list[bool]) -> None:
        self._reduced = list(value)

    def begin(self, reached: set[int]) -> None:
        """A backward starts that will reach these."""
        for index, leaf in enumerate(self._leaves):
            if not leaf.grad_buffer.full or leaf.grad_buffer.zeroed:
                self._reduced[index] = False
        self.aside = {
            index
            for index, reduced in enumerate(self._reduced)
            if reduced and index not in reached and not self._tensors[index].requires_grad
        }

    def has(self, index: int) -> bool:
        """The slot holds something to be reduced."""
        return self._leaves[index].grad_buffer.full and index not in self.aside

    def any(self) -> bool:
        """Some slot does, and it is more than zeros that were put there in place of what was thrown away."""
        return any(self.has(index) and not leaf.grad_buffer.zeroed for index, leaf in enumerate(self._leaves))

    def first_mean(self) -> int | None:
        """The first that holds a mean over ranks, to which the backward would add; None if none does."""
        return next((at for at, reduced in enumerate(self._reduced) if reduced and at not in self.aside), None)

    def end(self, index: int, by_any: bool) -> None:
        """The backward has ended. by_any: some rank had a gradient, and its mean is in the slot."""
        if by_any or index not in self.aside:
            slot = self._leaves[index].grad_buffer
            slot.full, slot.zeroed, self._reduced[index] = by_any, False, by_any
