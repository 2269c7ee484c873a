"""Collectives that combine values: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import check_lengths
from collectives.backends.shm.inline import Layout, Piece, PrefixOf, make_reduction, no_result
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.communicator_base import CommunicatorBase, Scale
from collectives.reduction import HALVES, ReduceOp, check_scale, describe
from collectives.transport import Signatures, Steps

# The largest array (bytes) whose reduction may run at the same time as the next call. Larger ones fill a network by
# themselves, and MPI allocates as much memory again.
_BESIDE = 32 << 20


class Reductions(CommunicatorBase):
    """The reductions of a communicator."""

    def all_reduce(
        self,
        x: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        scale: Scale = None,
        order: str | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces all ranks' x to one array, which every rank gets.

        x: (...), the same shape and dtype on every rank
        op: a `ReduceOp`, or its name; a mean of integers is rounded toward zero
        scale: a factor of the result: the same number on every rank, or a function that returns it. The function is
        called when all earlier calls of this communicator are complete, so it may depend on their results. Ranks
        compare the numbers, except those that a function returns for x on a GPU
        order: "tree": values are combined in one binary tree over ranks, so that the bits of a sum depend on neither
        transport, nodes nor length. If the transport combines in another order, an all-to-all gives each rank one
        part to combine, and an all-gather joins the parts. None: the transport's order
        out: (...) of x's dtype; `out=x` reduces in place
        Returns: (...) of x's dtype, a NumPy array, or a CuPy array for x on a GPU; or `out` itself
        Raises: DtypeError if op or scale is not defined for the dtype; ArgumentError if there is no such op or order,
        scale is not a real number, or out does not fit or is read-only; CollectivesError if a function given as scale
        fails or does not return a real number.
        """
        return self._reduce("all_reduce", x, op, 0, None, scale, out, async_op, order)

    def reduce(
        self,
        x: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        root: int = 0,
        *,
        scale: Scale = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces all ranks' x to one array, which only the root gets.

        x, op, scale, out: as in `all_reduce`; out is used on the root only
        Returns: (...) of x's dtype on the root, None elsewhere
        Raises: as `all_reduce`; ArgumentError if there is no such root.
        """
        out = out if self.rank == root else None
        return self._reduce("reduce", x, op, self._check_root(root), None, scale, out, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        scale: Scale = None,
        lengths: Sequence[int] | None = None,
        order: str | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces all ranks' x to one array, and splits it along axis 0: each rank gets its own rows.

        x: (n, ...), the same shape and dtype on every rank; op, scale: as in `all_reduce`
        lengths: the rows of each rank, the same list on every rank; None: `np.array_split`'s rule, as even as possible,
        longer parts first
        order: as in `all_reduce`, but no all-gather is needed
        out: (n_r, ...) of x's dtype
        Returns: (n_r, ...) of x's dtype
        Raises: as `all_reduce`; ArgumentError if x is 0-d, or lengths are invalid or do not add up to n.
        """
        return self._reduce("reduce_scatter", x, op, 0, lengths, scale, out, async_op, order)

    def _reduce(
        self,
        name: str,
        x: Any,
        op: ReduceOp | str,
        root: int,
        lengths: Sequence[int] | None,
        scale: Scale,
        out: Any,
        async_op: bool,
        order: str | None = None,
    ) -> Any:
        arrays = self._arrays(x)
        source = arrays.read(x)
        if lengths is not None:
            lengths = tuple(check_lengths(lengths, self.size))
        key = (arrays.device_text, name, op, root, lengths, source.dtype, source.shape, order)
        plan = self._plan(self._plan_reduction, key)
        if scale is not None:
            number = check_scale(source.dtype, scale)
            scale = scale if callable(scale) else number
        target = arrays.reduction_target(plan, source, out, out is x)
        return arrays.start(plan, source, target, out, async_op, scale)

    def _plan_reduction(
        self,
        device_text: str,
        name: str,
        op: ReduceOp | str,
        root: int,
        lengths: Sequence[int] | None,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: str | None,
    ) -> Plan:
        op = ReduceOp.parse(op)
        reduction = describe(name, op, root, lengths, dtype, shape, self.rank, self.size, order)
        if not device_text and self.transport.combines_halves and dtype in HALVES:
            reduction = reduction._replace(wire=dtype)

        def body(call: CollectiveOp[Any], transport: Any, sent: Any, total: Any) -> Steps[Any]:
            return call.arrays.reduce(call, reduction, transport, sent, total)

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout:
            if reduction.shape is None:
                return Layout(reduction.wire, [], no_result)
            first = last = None
            if reduction.parts:
                first = sum(reduction.parts[: self.rank])
                last = first + reduction.parts[self.rank]
            pieces = [Piece(rank, shape, first, last) for rank in range(self.size)]
            return Layout(reduction.wire, pieces, make_reduction(op, reduction.wire, dtype, self.size))

        nbytes = math.prod(shape) * reduction.wire.itemsize
        return Plan(
            name,
            reduction.text,
            dtype,
            shape,
            agreed=shape,
            reduction=reduction,
            body=body,
            layout=layout,
            result=reduction.shape,
            # Only a call whose body is one operation may run beside the next call. `reduce` and a reduction in tree
            # order may take two operations, and arrays on a GPU are copied before the operation.
            beside=not (device_text or name == "reduce" or reduction.in_tree) and nbytes <= _BESIDE,
            depth=3,
        )
