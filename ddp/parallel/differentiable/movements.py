"""Movements of rows between ranks that autograd sees; see `ddp.parallel` for the convention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from collectives import Communicator
from ddp._tensor.core import Tensor
from ddp.errors import DtypeError
from ddp.parallel.differentiable.meeting import Array, Together
from ddp.parallel.differentiable.reductions import row_counts

Lengths = Sequence[int] | Literal["equal"] | None


# y_r = x_root;  dx_root = sum over r of g_r, dx_s = 0 elsewhere
def broadcast(x: Tensor, root: int = 0, comm: Communicator | None = None) -> Tensor:
    """The root's x, on every rank.

    x: (...), the same shape and dtype on every rank; its values count on the root alone, and stay elsewhere
    Returns: (...), a new tensor
    Raises: what `Communicator.broadcast` raises.
    """
    call = Together("broadcast", x, comm)
    call.agree()
    on_root = call.comm.rank == root
    room = call.xp.array(call.array, order="C") if on_root else call.xp.empty(call.array.shape, call.array.dtype)

    def adjoint(g: Array) -> Array:
        total = call.comm.reduce(g, "sum", root)
        return call.xp.zeros(g.shape, g.dtype) if total is None else total

    return call.result(call.comm.broadcast(room, root), adjoint)


# y_root = [x_0 | x_1 | ...], y_r has no rows elsewhere;  dx_s = rows s of g_root
def gather(x: Tensor, root: int = 0, comm: Communicator | None = None, *, lengths: Lengths = None) -> Tensor:
    """All ranks' x joined along axis 0 in rank order, on the root; a tensor without rows on the others.

    x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d tensors count as (1,)
    lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
    Returns: (n_0 + n_1 + ..., ...) on the root, (0, ...) elsewhere; a backward must begin from each
    Raises: what `Communicator.gather` raises.
    """
    call = Together("gather", x, comm)
    shape = call.array.shape
    counts = _rows_of_all(call)
    whole = call.comm.gather(call.array, root, lengths=counts if lengths is None else lengths)
    if whole is None:
        whole = call.xp.empty((0, *shape[1:]), call.array.dtype)
    return call.result(whole, lambda g: call.comm.scatter(g, root, lengths=counts).reshape(shape))


# y_r = [x_0 | x_1 | ...];  dx_s = rows s of the sum over r of g_r
def all_gather(x: Tensor, comm: Communicator | None = None, *, lengths: Lengths = None) -> Tensor:
    """All ranks' x joined along axis 0 in rank order, on every rank, with gradients back to each rank.

    The result is as large as all ranks' x together: memory grows with the number of ranks, on every one of them.

    x, lengths: as in `gather`
    Returns: (n_0 + n_1 + ..., ...)
    Raises: what `Communicator.all_gather` raises.
    """
    call = Together("all_gather", x, comm)
    shape = call.array.shape
    counts = _rows_of_all(call)
    whole = call.comm.all_gather(call.array, lengths=counts if lengths is None else lengths)
    return call.result(whole, lambda g: call.comm.reduce_scatter(g, "sum", lengths=counts).reshape(shape))


# y_r = rows r of x_root;  dx_root = [g_0 | g_1 | ...]
def scatter(
    x: Tensor | None,
    root: int = 0,
    comm: Communicator | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The root's x split along axis 0, one part for each rank.

    x: (n, ...) on the root; elsewhere a tensor on the device where the part shall be, its shape and values ignored,
    or None for the CPU; lengths: the parts', read on the root only; None: as even as possible, longer parts first
    Returns: (n_r, ...) of the root's dtype
    Raises: what `Communicator.scatter` raises; DtypeError if the root's x is no tensor.
    """
    call = Together("scatter", x, comm, optional=True)
    rank, size = call.comm.rank, call.comm.size
    if rank == root and x is None:
        raise DtypeError("scatter: expected a tensor on the root, got None")
    counts = call.hear(root, row_counts("scatter", call.array, lengths, size) if rank == root else [0] * size)
    part = call.comm.scatter(call.array, root, lengths=lengths if counts is None else counts)
    return call.result(part, lambda g: call.comm.gather(g, root, lengths=counts))


# y_r = [x_0's rows for r | x_1's rows for r | ...];  dx_s = [g_0's rows from s | g_1's rows from s | ...]
def all_to_all(x: Tensor, comm: Communicator | None = None, *, lengths: Sequence[int] | None = None) -> Tensor:
    """Every rank's x split along axis 0, one part for each rank; what came here, joined in rank order.

    x: (n_r, ...); the n_r may differ, the rest and the dtype may not; lengths: how many rows this rank sends to each;
    None: as even as possible, longer parts first
    Returns: (m_r, ...), a new tensor
    Raises: ArgumentError if x is 0-d or lengths do not fit it; what `Communicator.all_to_all` raises.
    """
    call = Together("all_to_all", x, comm)
    sent = row_counts("all_to_all", call.array, lengths, call.comm.size)
    table = call.agree(*sent)  # table[source][destination]
    came = call.comm.all_to_all(call.array, lengths=sent if table is None else table)

    def adjoint(g: Array) -> Array:
        assert table is not None
        return call.comm.all_to_all(g, lengths=[list(back) for back in zip(*table, strict=True)])

    return call.result(came, adjoint)


def _rows_of_all(call: Together) -> list[int] | None:
    """How many rows each rank brings, as far as backward may want to know."""
    told = call.agree(len(call.array) if call.array.ndim else 1)
    return None if told is None else [rows for (rows,) in told]
