"""How a collective becomes a node of the graph: on all ranks or on none, since its backward is a collective too.

If a gradient is wanted on one rank only, the others must still meet it in backward. So ranks tell each other whether
their tensor requires grad, in one small message before the collective, and if any does, all record a node: the result
requires grad on every rank. The message carries the lengths along axis 0 besides, which backward has to know.

Under `no_grad` nothing is told, and nothing is recorded; a rank that is in `no_grad` while others are not makes other
calls than they do, which is an error of the kind that `collectives` reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from ddp._device import device
from ddp._engine import CollectiveNode, modes
from ddp._tensor.base import TensorBase, check_current, wrap
from ddp._tensor.core import Tensor
from ddp.errors import DtypeError
from ddp.parallel.differentiable.twins import twin_of

Array = Any
Adjoint = Callable[[Array], Array | None]


class Together:
    """One call of such a collective on this rank.

    comm: what it goes over, forward and backward; array: the tensor's; xp: the array module; recorded: all ranks
    record a node
    """

    def __init__(self, name: str, x: Tensor | None, comm: Communicator | None, *, optional: bool = False) -> None:
        if not isinstance(x, TensorBase) and not (optional and x is None):
            raise DtypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x is not None:
            check_current(name, x)
        self._op = _Backward(name)
        self._edge = None if x is None else x.edge
        self._where = device("cpu") if x is None else x.device
        self.recorded = False
        self.comm = twin_of(comm)
        self.array: Array = None if x is None else x.array
        self.xp = self._where.xp

    def agree(self, *told: int) -> list[list[int]] | None:
        """Finds out whether any rank wants a gradient. Collective, but for ranks under `no_grad`.

        Returns: what each rank told, in rank order; None under `no_grad`
        """
        if not modes.state.enabled:
            return None
        mine = np.array([self._edge is not None, *told], np.int64)
        table = self.comm.all_gather(mine, lengths="equal").reshape(self.comm.size, -1)
        self.recorded = bool(table[:, 0].any())
        return [row[1:] for row in table.tolist()]

    def hear(self, root: int, told: Sequence[int]) -> list[int] | None:
        """As `agree`, where the root's tensor alone counts, and what the root tells: as many numbers as given here."""
        if not modes.state.enabled:
            return None
        message = np.array([self._edge is not None, *told], np.int64)
        self.comm.broadcast(message, root)
        self.recorded = bool(message[0])
        return message[1:].tolist()

    def result(self, array: Array, adjoint: Adjoint) -> Tensor:
        """The tensor around `array`, with its place in the graph.

        adjoint: makes of the result's gradient, which it must not write to, that of the tensor, or None. Collective;
        what it returns goes nowhere on ranks whose tensor does not require grad.
        """
        result = wrap(array, self._where)
        if self.recorded:
            residual = (adjoint, array.shape, array.dtype)
            node = CollectiveNode(self._op, self.xp, (self._edge,), (self._edge is not None,), (), (), residual)
            result.edge = node
            for observer in modes.state.observers:
                observer(node)
        return result


class _Backward:
    """The op of one collective, as the engine sees it."""

    saves: tuple[str, ...] = ()
    into = False

    def __init__(self, name: str) -> None:
        self.name = name

    def backward(self, xp: Any, g: Array | None, needs: Sequence[bool], saved: Any, residual: Any) -> Sequence[Any]:
        adjoint, shape, dtype = residual
        # The ranks' gradients must be alike, whatever each rank's loss made of the result.
        dx = adjoint(xp.zeros(shape, dtype) if g is None else xp.asarray(g, dtype))
        return (dx if needs[0] else None,)
