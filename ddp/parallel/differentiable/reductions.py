"""Reductions that autograd sees; see `ddp.parallel` for the convention."""

from __future__ import annotations

from collections.abc import Sequence

from collectives import Communicator, ReduceOp
from collectives.errors import ArgumentError
from collectives.lengths import check_lengths, even_lengths
from ddp._tensor.core import Tensor
from ddp.errors import GraphError
from ddp.parallel.differentiable.meeting import Array, Together

_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)


# y_r = sum over s of x_s;  dx_s = sum over r of g_r.  mean: both divided by the number of ranks
def all_reduce(x: Tensor, op: ReduceOp | str = "sum", comm: Communicator | None = None) -> Tensor:
    """The reduction of all ranks' x, on every rank.

    x: (...), the same shape and dtype on every rank; op: sum, mean, and where no rank's x requires grad max, min, prod
    Returns: (...), a new tensor
    Raises: GraphError, on every rank, if x requires grad on one and op has no gradient; what `Communicator.all_reduce`
    raises.
    """
    call, op = Together("all_reduce", x, comm), ReduceOp.parse(op)
    _agree(call, op)
    return call.result(call.comm.all_reduce(call.array, op), lambda g: call.comm.all_reduce(g, op))


# y_root = sum over s of x_s, y_r = 0 elsewhere;  dx_s = g_root.  mean: both divided by the number of ranks
def reduce(x: Tensor, op: ReduceOp | str = "sum", root: int = 0, comm: Communicator | None = None) -> Tensor:
    """The reduction of all ranks' x, on the root; zeros on the others, so that each has something to go back from.

    x, op, Raises: as in `all_reduce`; Returns: (...), a new tensor
    """
    call, op = Together("reduce", x, comm), ReduceOp.parse(op)
    _agree(call, op)
    total = call.comm.reduce(call.array, op, root)

    def adjoint(g: Array) -> Array:
        return _divided(call.comm.broadcast(call.xp.array(g, order="C"), root), op, call)

    return call.result(call.xp.zeros(call.array.shape, call.array.dtype) if total is None else total, adjoint)


# y_r = rows r of the sum over s of x_s;  dx_s = [g_0 | g_1 | ...].  mean: both divided by the number of ranks
def reduce_scatter(
    x: Tensor,
    op: ReduceOp | str = "sum",
    comm: Communicator | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The reduction of all ranks' x, split along axis 0, one part for each rank.

    x: (n, ...), the same shape and dtype on every rank; op: as in `all_reduce`; lengths: the parts', the same list on
    every rank; None: as even as possible, longer parts first
    Returns: (n_r, ...), a new tensor
    Raises: as `all_reduce`; ArgumentError if x is 0-d or lengths do not fit.
    """
    call, op = Together("reduce_scatter", x, comm), ReduceOp.parse(op)
    counts = row_counts("reduce_scatter", call.array, lengths, call.comm.size)
    _agree(call, op)
    part = call.comm.reduce_scatter(call.array, op, lengths=counts)
    return call.result(part, lambda g: _divided(call.comm.all_gather(g, lengths=counts), op, call))


def row_counts(name: str, x: Array, lengths: Sequence[int] | None, size: int) -> list[int]:
    """How many of x's rows go to each rank. Raises: ArgumentError if x is 0-d or lengths do not fit it."""
    if x.ndim == 0:
        raise ArgumentError(f"{name}: splits axis 0, and x is 0-d")
    counts = even_lengths(len(x), size) if lengths is None else check_lengths(lengths, size)
    if sum(counts) != len(x):
        raise ArgumentError(f"{name}: lengths {counts} add up to {sum(counts)}, x has {len(x)} rows")
    return counts


def _agree(call: Together, op: ReduceOp) -> None:
    call.agree()
    if call.recorded and op not in _LINEAR:
        raise GraphError(
            f"{op.value} over ranks has no gradient, and x requires grad on some rank: reduce x.detach(), or "
            f"all_gather x, which has one, and take the {op.value} of the result"
        )


def _divided(mine: Array, op: ReduceOp, call: Together) -> Array:
    if op is ReduceOp.MEAN:
        mine /= call.comm.size
    return mine
