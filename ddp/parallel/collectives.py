"""Collectives with gradients, on tensors. `ddp.parallel` defines the gradients.

Forward and backward are one collective each, so all ranks must run both, even if only one rank needs a gradient. So
before the collective the ranks exchange a small message: does their tensor require grad? If any does (`scatter`: if the
root's does), all ranks record a node, and the result requires grad on all of them. The message also contains the
lengths along axis 0 that backward needs. Under `no_grad` there is no such message, and nothing is recorded.

The calls go over a private duplicate of the communicator. Their backward runs inside `loss.backward()`, at the same
time as DataParallel's reductions and calls of the user. If all these shared one communicator, their order could differ
between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

import collectives
from collectives import Communicator, ReduceOp
from collectives.arrays import check_lengths, even_lengths
from collectives.errors import ArgumentError
from ddp._device import CPU, device_of
from ddp._engine import CollectiveNode, Node, modes, no_grad
from ddp._tensor.base import TensorBase, check_current, make_node, record, wrap
from ddp._tensor.core import Tensor
from ddp.errors import DtypeError, GraphError

_duplicates: WeakKeyDictionary[Communicator, Communicator] = WeakKeyDictionary()


def private_duplicate(comm: Communicator | None) -> Communicator:
    """The duplicate of `comm` (None: `collectives.init()`) for these collectives. It is closed together with `comm`.

    The first call with a communicator is collective.
    """
    comm = collectives.init() if comm is None else comm
    duplicate = _duplicates.get(comm)
    if duplicate is None:
        duplicate = _duplicates[comm] = comm.duplicate()
        comm.registry.close_with(comm.key, duplicate.queue)
    return duplicate


Array = Any
Adjoint = Callable[[Tensor], Tensor]


class CollectiveCall:
    """One call of a collective on this rank. x: the tensor; optional: x may be None

    comm: the private duplicate that the call goes over; array: of the tensor; xp: the array module
    recorded: whether all ranks record a node

    Raises: DtypeError if x is not a tensor; InplaceError if x is a view whose base was changed in place afterwards.
    """

    def __init__(self, name: str, x: Tensor | None, comm: Communicator | None, *, optional: bool = False) -> None:
        if not isinstance(x, TensorBase) and not (optional and x is None):
            raise DtypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x is not None:
            check_current(name, x)
        self._name = name
        self._x = x
        self._device = CPU if x is None else x.device
        self.recorded = False
        self.comm = private_duplicate(comm)
        self.array: Array = None if x is None else x.array
        self.xp = self._device.xp

    def agree(self, *numbers: int, root: int | None = None) -> list[list[int]] | None:
        """Sets `recorded` to True on all ranks if any rank's tensor requires grad; with a root, if the root's does.

        Collective, except under `no_grad`. numbers: sent in the same message, equally many on every rank
        Returns: the numbers of each rank, in rank order; None under `no_grad`
        """
        if not modes.state.enabled:
            return None
        row = np.array([self._x is not None and self._x.edge is not None, *numbers], np.int64)
        table = self.comm.all_gather(row, lengths="equal").reshape(self.comm.size, -1)
        self.recorded = bool(table[:, 0].any() if root is None else table[root, 0])
        return [row[1:] for row in table.tolist()]

    def result(self, array: Array, adjoint: Adjoint) -> Tensor:
        """Wraps the result in a tensor, and records its node.

        adjoint: computes the tensor's gradient from the result's. All ranks call it, but a rank whose tensor does not
        require grad ignores what it returns. Under create_graph, the ops of the call are recorded
        """
        result = wrap(array, self._device)
        if self.recorded:
            op = _CollectiveBackward(self._name)
            zeros = result.new_zeros(()).expand(array.shape)
            record(make_node(CollectiveNode, op, op, self.xp, [self._x], result, (adjoint, zeros)), [result])
        return result


class _CollectiveBackward:
    """The op of one collective in the graph."""

    saves: tuple[str, ...] = ()
    grad_out = False

    def plan(self, needs: Sequence[bool]) -> tuple[int, ...]:
        """Saves no input, because backward reads none."""
        return ()

    def __init__(self, name: str) -> None:
        self.name = name

    def backward(self, xp: Any, g: Array | None, needs: Sequence[bool], saved: Any, residual: Any) -> Sequence[Any]:
        adjoint, zeros = residual
        # The gradients of all ranks must have the dtype of the result, whatever dtype a rank's loss has.
        array = zeros.array if g is None else xp.asarray(g, zeros.dtype)
        with no_grad():
            dx = adjoint(wrap(array, zeros.device))
        return (dx.array if needs[0] else None,)

    def record_backward(self, node: Node, g: Tensor | None, needs: Sequence[bool]) -> Sequence[Tensor]:
        """The gradient as a tensor. All ranks record its computation, even if they do not need the gradient."""
        adjoint, zeros = node.residual
        return (adjoint(tied(node, zeros.array, g)),)


def tied(node: Node, like: Array, g: Tensor | None) -> Tensor:
    """The gradient g of a collective's result, or zeros if g is None, plus 0 times the result.

    The second term makes a backward from the gradient reach this collective on every rank. Without it, the collective
    would be missing on a rank whose gradient does not depend on the result (its loss is linear in the result).

    like: an array with the shape and dtype of the result
    """
    result = wrap(like, device_of(like))
    result.edge = node
    return result * 0.0 if g is None else g + result * 0.0


_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)


# y_r = sum over s of x_s;  dx_s = sum over r of g_r.  mean: both divided by the number of ranks
def all_reduce(x: Tensor, op: ReduceOp | str = "sum", comm: Communicator | None = None) -> Tensor:
    """The reduction of all ranks' x, on every rank.

    x: (...), the same shape and dtype on every rank
    op: sum or mean; max, min and prod only under `no_grad`, or if no rank's x requires grad
    Returns: (...), a new tensor
    Raises: GraphError on every rank if x requires grad on one of them and op has no gradient, except under `no_grad`;
    DtypeError if x is not a tensor; what `Communicator.all_reduce` raises.
    """
    call = CollectiveCall("all_reduce", x, comm)
    op = ReduceOp.parse(op)
    _agree(call, op)
    return call.result(call.comm.all_reduce(call.array, op), lambda g: all_reduce(g, op, comm))


# y_root = sum over s of x_s, y_r = 0 elsewhere;  dx_s = g_root.  mean: both divided by the number of ranks
def reduce(x: Tensor, op: ReduceOp | str = "sum", root: int = 0, comm: Communicator | None = None) -> Tensor:
    """The reduction of all ranks' x on the root. The other ranks get zeros, from which they can call backward.

    x, op: as in `all_reduce`; Returns: (...), a new tensor
    Raises: as `all_reduce`; what `Communicator.reduce` raises.
    """
    call = CollectiveCall("reduce", x, comm)
    op = ReduceOp.parse(op)
    _agree(call, op)
    total = call.comm.reduce(call.array, op, root)
    if total is None:
        total = call.xp.zeros(call.array.shape, call.array.dtype)
    return call.result(total, lambda g: _divided(broadcast(g, root, comm), op, call))


# y_r = rows r of the sum over s of x_s;  dx_s = [g_0 | g_1 | ...].  mean: both divided by the number of ranks
def reduce_scatter(
    x: Tensor,
    op: ReduceOp | str = "sum",
    comm: Communicator | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The reduction of all ranks' x, split along axis 0, one part for each rank.

    x: (n, ...), the same shape and dtype on every rank; op: as in `all_reduce`; lengths: of the parts, the same list on
    every rank; None: as even as possible, longer parts first
    Returns: (n_r, ...), a new tensor
    Raises: as `all_reduce`; ArgumentError if x is 0-d or lengths do not fit.
    """
    call = CollectiveCall("reduce_scatter", x, comm)
    op = ReduceOp.parse(op)
    counts = row_counts("reduce_scatter", call.array, lengths, call.comm.size)
    _agree(call, op)
    part = call.comm.reduce_scatter(call.array, op, lengths=counts)
    return call.result(part, lambda g: _divided(all_gather(g, comm, lengths=counts), op, call))


def row_counts(name: str, x: Array, lengths: Sequence[int] | None, size: int) -> list[int]:
    """How many of x's rows go to each rank. Raises: ArgumentError if x is 0-d or lengths do not fit it."""
    if x.ndim == 0:
        raise ArgumentError(f"{name}: splits axis 0, and x is 0-d")
    counts = even_lengths(len(x), size) if lengths is None else check_lengths(lengths, size)
    if sum(counts) != len(x):
        raise ArgumentError(f"{name}: lengths {counts} add up to {sum(counts)}, x has {len(x)} rows")
    return counts


def _agree(call: CollectiveCall, op: ReduceOp) -> None:
    call.agree()
    if call.recorded and op not in _LINEAR:
        raise GraphError(
            f"{op.value} over ranks has no gradient, and x requires grad on some rank: reduce x.detach(), or "
            f"all_gather x, which has one, and take the {op.value} of the result"
        )


def _divided(total: Tensor, op: ReduceOp, call: CollectiveCall) -> Tensor:
    return total / call.comm.size if op is ReduceOp.MEAN else total


Lengths = Sequence[int] | Literal["equal"] | None


# y_r = x_root;  dx_root = sum over r of g_r, dx_s = 0 elsewhere
def broadcast(x: Tensor, root: int = 0, comm: Communicator | None = None) -> Tensor:
    """The root's x, on every rank.

    x: (...), the same shape and dtype on every rank; only the root's values are used, and no x changes
    Returns: (...), a new tensor
    Raises: DtypeError if x is not a tensor; what `Communicator.broadcast` raises.
    """
    call = CollectiveCall("broadcast", x, comm)
    call.agree()
    on_root = call.comm.rank == root
    buffer = call.xp.array(call.array, order="C") if on_root else call.xp.empty(call.array.shape, call.array.dtype)
    return call.result(call.comm.broadcast(buffer, root), lambda g: reduce(g, "sum", root, comm))


# y_root = [x_0 | x_1 | ...], y_r has no rows elsewhere;  dx_s = rows s of g_root
def gather(x: Tensor, root: int = 0, comm: Communicator | None = None, *, lengths: Lengths = None) -> Tensor:
    """All ranks' x joined along axis 0 in rank order, on the root; a tensor without rows on the others.

    x: (n_r, ...); only the n_r may differ between ranks; 0-d tensors count as (1,)
    lengths: all n_r, if every rank knows them; "equal": all n_r are the same; None: they are exchanged first
    Returns: (n_0 + n_1 + ..., ...) on the root, (0, ...) elsewhere. If the result requires grad, every rank must call
    backward from its result
    Raises: DtypeError if x is not a tensor; what `Communicator.gather` raises.
    """
    call = CollectiveCall("gather", x, comm)
    shape = call.array.shape
    counts = _rows_of_all(call)
    whole = call.comm.gather(call.array, root, lengths=counts if lengths is None else lengths)
    if whole is None:
        whole = call.xp.empty((0, *shape[1:]), call.array.dtype)
    return call.result(whole, lambda g: scatter(g, root, comm, lengths=counts).reshape(shape))


# y_r = [x_0 | x_1 | ...];  dx_s = rows s of the sum over r of g_r
def all_gather(x: Tensor, comm: Communicator | None = None, *, lengths: Lengths = None) -> Tensor:
    """All ranks' x joined along axis 0 in rank order, on every rank, with gradients back to each rank.

    The result is as large as all ranks' x together, so the memory of every rank grows with the number of ranks.

    x, lengths: as in `gather`
    Returns: (n_0 + n_1 + ..., ...)
    Raises: DtypeError if x is not a tensor; what `Communicator.all_gather` raises.
    """
    call = CollectiveCall("all_gather", x, comm)
    shape = call.array.shape
    counts = _rows_of_all(call)
    whole = call.comm.all_gather(call.array, lengths=counts if lengths is None else lengths)
    return call.result(whole, lambda g: reduce_scatter(g, "sum", comm, lengths=counts).reshape(shape))


# y_r = rows r of x_root;  dx_root = [g_0 | g_1 | ...]
def scatter(
    x: Tensor | None,
    root: int = 0,
    comm: Communicator | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The root's x split along axis 0, one part for each rank.

    x: (n, ...) on the root; on other ranks only its device matters, which is that of the result (None: the CPU)
    lengths: of the parts, read on the root only; None: as even as possible, longer parts first
    Returns: (n_r, ...) of the root's dtype
    Raises: DtypeError if the root's x is not a tensor, or another rank's x neither a tensor nor None; on the root,
    ArgumentError if x is 0-d or lengths do not fit it; what `Communicator.scatter` raises.
    """
    call = CollectiveCall("scatter", x, comm, optional=True)
    rank = call.comm.rank
    size = call.comm.size
    if rank == root and x is None:
        raise DtypeError("scatter: expected a tensor on the root, got None")
    sent = row_counts("scatter", call.array, lengths, size) if rank == root else [0] * size
    table = call.agree(*sent, root=root)
    counts = None if table is None else table[root]
    part = call.comm.scatter(call.array, root, lengths=lengths if counts is None else counts)
    like = None if rank == root else x

    def adjoint(g: Tensor) -> Tensor:
        whole = gather(g, root, comm, lengths=counts)
        # Off the root `gather` returns no rows. Their sum is 0, which expands to zeros of the right shape.
        return whole if like is None else whole.sum().expand(like.shape)

    return call.result(part, adjoint)


# y_r = [x_0's rows for r | x_1's rows for r | ...];  dx_s = [g_0's rows from s | g_1's rows from s | ...]
def all_to_all(x: Tensor, comm: Communicator | None = None, *, lengths: Sequence[int] | None = None) -> Tensor:
    """Splits every rank's x along axis 0, one part for each rank, and joins the received parts in rank order.

    x: (n_r, ...); only the n_r may differ between ranks; lengths: how many rows this rank sends to each rank; None: as
    even as possible, longer parts first
    Returns: (m_r, ...), a new tensor
    Raises: DtypeError if x is not a tensor; ArgumentError if x is 0-d or lengths do not fit it; what
    `Communicator.all_to_all` raises.
    """
    call = CollectiveCall("all_to_all", x, comm)
    sent = row_counts("all_to_all", call.array, lengths, call.comm.size)
    table = call.agree(*sent)  # table[source][destination]
    received = call.comm.all_to_all(call.array, lengths=sent if table is None else table)
    rank = call.comm.rank
    return call.result(received, lambda g: all_to_all(g, comm, lengths=[row[rank] for row in table or ()]))


def _rows_of_all(call: CollectiveCall) -> list[int] | None:
    """How many rows each rank has; None under `no_grad`, where there is no backward that needs them."""
    table = call.agree(len(call.array) if call.array.ndim else 1)
    return None if table is None else [rows for (rows,) in table]
