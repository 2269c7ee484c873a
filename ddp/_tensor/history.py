"""`grad_fn`: which op made a tensor, for people who look; the engine does not use it."""

from __future__ import annotations

from ddp._engine import Leaf, Node
from ddp.ops.op import OPS


class GradFn:
    """The op that made a tensor. Two are equal if they are of the same run of an op."""

    __slots__ = ("_edge",)

    def __init__(self, edge: Node | Leaf) -> None:
        self._edge = edge

    def name(self) -> str:
        """ "AddBackward0" for add; "AccumulateGrad" for a leaf."""
        if isinstance(self._edge, Leaf):
            return "AccumulateGrad"
        name = self._edge.op.name
        if name not in OPS:
            return f"{name}Backward"  # a Function of the user's, by its own name
        return "".join(part[:1].upper() + part[1:] for part in name.split("_")) + "Backward0"

    @property
    def next_functions(self) -> tuple[tuple[GradFn | None, int], ...]:
        """Where the gradients go from here: for each input what made it, None if it gets none; () once freed."""
        if isinstance(self._edge, Leaf) or self._edge.edges is None:
            return ()
        return tuple((None if edge is None else GradFn(edge), 0) for edge in self._edge.edges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradFn) and other._edge is self._edge

    def __hash__(self) -> int:
        return hash(self._edge)

    def __repr__(self) -> str:
        return f"<{self.name()} object at {id(self._edge):#x}>"
