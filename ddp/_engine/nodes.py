"""What the graph is made of: one node for each op that ran, and the version counters of what it saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ddp._engine.leaves import Array, Leaf
from ddp.errors import VersionError


class Version:
    """How often the memory of a tensor and its views was written in place; shared by all of them."""

    count = 0  # a class attribute, so that making one for every tensor runs no __init__


class Differentiable(Protocol):
    """What the engine asks of an op."""

    name: str
    saves: tuple[str, ...]
    backward: Callable[..., Sequence[Array | None]]


_numbers = itertools.count()


class Node:
    """One op that ran: what its backward needs, and where the gradients go."""

    __slots__ = ("__weakref__", "edges", "needs", "number", "op", "residual", "saved", "versions", "xp")

    def __init__(
        self,
        op: Differentiable,
        xp: Any,
        edges: tuple[Node | Leaf | None, ...],
        needs: tuple[bool, ...],
        saved: tuple[Any, ...],
        versions: Sequence[tuple[Version, int, int]],
        residual: Any,
    ) -> None:
        self.number = next(_numbers)  # creation order: a higher number is nearer the loss
        self.op = op
        self.xp = xp
        self.edges: tuple[Node | Leaf | None, ...] | None = edges  # one per input; None once freed
        self.needs = needs
        self.saved = saved  # arrays, in the order of op.saves
        self.versions = versions  # (counter, count at save time, position in saved) of each saved tensor
        self.residual = residual  # what backward needs besides: shapes, masks, parameters

    def run(self, g: Array) -> Sequence[Array | None]:
        """The gradients of the inputs. Raises: VersionError if a saved value was changed in place since."""
        for counter, count, position in self.versions:
            if counter.count != count:
                raise VersionError(
                    f"{self.op.name}: backward reads {self.op.saves[position]!r} of shape "
                    f"{tuple(self.saved[position].shape)}, saved at version {count}, but it was changed in place and "
                    f"is now at version {counter.count}; use the out-of-place form, or clone() it before"
                )
        return self.op.backward(self.xp, g, self.needs, self.saved, self.residual)

    def free(self) -> None:
        """Lets go of everything, so that memory falls while backward still runs."""
        self.edges = None
        self.saved = ()
        self.versions = ()
        self.residual = None


Edge = Node | Leaf
