"""PyTorch's process group functions, as calls of a communicator: what a script needs that was written for DDP.

The ranks are those of `collectives.init()`. A group is one of its communicators: what `new_group` returns, or what
`split` and `create_group` of a communicator return; None and `group.WORLD` are all ranks. As in PyTorch, `src`, `dst`
and `peer` are ranks of the world whatever the group is, and `group_src`, `group_dst` and `group_peer` ranks in the
group; without either, the root is rank 0 of the world. On a rank outside the group a collective warns and does nothing.

An output must have the dtype, shape and device of what arrives in it, else the call raises ArgumentError. Calls with
`async_op=True` return a `Work` at once. New code calls the communicator, see docs/collectives.md.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, ParamSpec, TypeVar

import collectives
from collectives import Communicator
from ddp._tensor.core import Tensor
from ddp._tensor.functions import stack
from ddp.errors import ArgumentError, ParallelError

__all__ = ["GroupMember", "P2POp", "ReduceOp", "Work", "all_gather", "all_gather_into_tensor", "all_gather_object"]
__all__ += ["all_gather_single", "all_reduce", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"]
__all__ += ["broadcast_object_list", "destroy_process_group", "gather", "gather_object", "get_backend"]
__all__ += ["get_global_rank", "get_group_rank", "get_node_local_rank", "get_process_group_ranks", "get_rank"]
__all__ += ["get_world_size", "group", "init_process_group", "irecv", "is_available", "is_initialized", "isend"]
__all__ += ["new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_single"]
__all__ += ["reduce_scatter_tensor", "scatter", "scatter_object_list", "send"]

P = ParamSpec("P")
T = TypeVar("T")
#: A communicator; None: of all ranks; GroupMember.NON_GROUP_MEMBER: of others.
Group = Communicator | int | None
#: None where it is not given.
Rank = int | None
#: In seconds or as a timedelta; None: the communicator's.
Timeout = timedelta | float | None

_initialized = False


class ReduceOp:
    """The names of reductions."""

    SUM, AVG, PRODUCT, MIN, MAX = "sum", "mean", "prod", "min", "max"


class _World(type):
    @property
    def WORLD(cls) -> Communicator | None:
        return collectives.init() if _initialized else None


class GroupMember(metaclass=_World):
    """WORLD: the group of all ranks, None before `init_process_group`.

    NON_GROUP_MEMBER: what `new_group` returns on a rank outside the new group
    """

    NON_GROUP_MEMBER = -100


group = GroupMember  # PyTorch has group.WORLD, too


class Work:
    """A collective, send or receive under way, as `async_op=True`, `isend` and `irecv` return it.

    Until `wait` returns or `is_completed` is True, its tensors must be neither changed nor, if they are outputs, read.
    """

    def __init__(self, work: collectives.Work[Any], outputs: Sequence[Tensor] = (), rows: Any = ()) -> None:
        """outputs: where `rows` are copied once they have arrived"""
        self._work = work
        self._outputs = outputs
        self._rows = rows

    def wait(self, timeout: Timeout = None) -> bool:
        """Returns True once the outputs can be used.

        Raises: CollectiveTimeout if that is not so after `timeout`; whatever ended the collective.
        """
        self._work.wait(_seconds(timeout))
        _copy_out(self._outputs, self._rows)
        self._outputs = self._rows = ()  # a second call copies nothing: the outputs may have changed
        return True

    def is_completed(self) -> bool:
        """Whether the outputs can be used. Raises: whatever ended the collective."""
        return self._work.done() and self.wait()


def _copy_out(outputs: Sequence[Tensor], rows: Any) -> None:
    for output, row in zip(outputs, rows, strict=True):
        _written(output).copy_(row)


def _finish(work: Any, async_op: bool, outputs: Sequence[Tensor] = (), rows: Any = ()) -> Work | None:
    """What a collective returns. work: what the communicator returned; outputs, rows: as of `Work`"""
    if async_op:
        return Work(work, outputs, rows)
    _copy_out(outputs, rows)
    return None


def _seconds(timeout: Timeout) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def _error(text: str) -> ArgumentError:
    return ArgumentError(f"rank {get_rank()}: {text}")


# Groups --------------------------------------------------------------------------------------------------------------


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    **ignored: Any,
) -> None:
    """Joins the world; `collectives.init()` is the same. Collective.

    backend: "nccl" raises where a rank cannot use it; None and "gloo" take what is there
    timeout: of every collective, in seconds or as a timedelta
    world_size, rank: checked if they are given, here or in the environment: who starts the ranks decides them
    init_method and other arguments change nothing: ranks meet through MPI

    Raises: ParallelError for a world of another size than was asked for.
    """
    global _initialized
    name = "nccl" if backend is not None and "nccl" in backend else "auto"
    seconds = _seconds(timeout)
    comm = collectives.init(name, 600.0 if seconds is None else seconds)
    asked = world_size if world_size != -1 else int(os.environ.get("WORLD_SIZE", comm.size))
    if asked != comm.size or rank not in (-1, comm.rank):
        raise ParallelError(
            f"init_process_group: {'a rank' if rank == -1 else f'rank {rank}'} of {asked} was expected, and this "
            f"process is rank {comm.rank} of {comm.size}; start the ranks with ddp-launch -n {asked}, mpiexec or srun"
        )
    _initialized = True


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    *ignored: Any,
    sort_ranks: bool = True,
    **also_ignored: Any,
) -> Communicator | int:
    """A group of some of the ranks. All its members call it; that the others do too, as in PyTorch, changes nothing.

    ranks: of the world, the same on every rank; None: all
    timeout: of every collective of the group, in seconds or as a timedelta; None: the world's
    sort_ranks: False: the ranks of the group are in the order of `ranks`
    Other arguments change nothing: a group uses the backend of the world.

    Returns: the group on its members, GroupMember.NON_GROUP_MEMBER elsewhere
    Raises: ArgumentError if `ranks` has a rank twice, or one that does not exist; CollectiveTimeout if not all members
    call it with the same ranks.
    """
    world = collectives.init()
    members = [get_global_rank(world, rank) for rank in (world.ranks if ranks is None else ranks)]
    if world.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    return world.create_group(sorted(members) if sort_ranks else members, timeout=_seconds(timeout))


def destroy_process_group(group: Group = None) -> None:
    """Closes a group; of all ranks there is nothing to close before the process ends."""
    global _initialized
    if group is None or group == GroupMember.WORLD:
        _initialized = False
    elif isinstance(group, Communicator):
        group.close()


def is_available() -> bool:
    """True."""
    return True


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and `destroy_process_group` not since."""
    return _initialized


class _NotAMemberError(ArgumentError):
    """This rank is not in the group."""


def _comm(group: Group) -> Communicator:
    if group is None:
        return collectives.init()
    if group == GroupMember.NON_GROUP_MEMBER:
        raise _NotAMemberError(f"rank {get_rank()} is not a member of the group")
    if not isinstance(group, Communicator):
        raise _error(f"group should be None or what new_group returned, is {group!r}")
    return group


def get_rank(group: Group = None) -> int:
    """This process's rank in the group, -1 if it is no member."""
    return -1 if group == GroupMember.NON_GROUP_MEMBER else _comm(group).rank


def get_world_size(group: Group = None) -> int:
    """The number of ranks in the group, -1 if this process is no member."""
    return -1 if group == GroupMember.NON_GROUP_MEMBER else _comm(group).size


def get_node_local_rank(fallback_rank: Rank = None) -> int:
    """This process's rank among those of its node."""
    return collectives.init().local_rank


def get_backend(group: Group = None) -> str:
    """What carries arrays of the CPU: "mpi", or "single" for one rank."""
    return _comm(group).backend


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The ranks of the world that the group has, in its order."""
    return list(_comm(group).ranks)


def get_global_rank(group: Group, group_rank: int) -> int:
    """The rank of the world that a rank in the group is. Raises: ArgumentError if the group has no such rank."""
    ranks = get_process_group_ranks(group)
    if group_rank not in range(len(ranks)):
        raise _error(f"rank {group_rank} is not in the group, whose ranks are 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def get_group_rank(group: Group, global_rank: int) -> int:
    """The rank in the group that a rank of the world is. Raises: ArgumentError if it is not in the group."""
    ranks = get_process_group_ranks(group)
    if global_rank not in ranks:
        raise _error(f"rank {global_rank} of the world is not in the group, which has its ranks {ranks}")
    return ranks.index(global_rank)


def _group_rank(comm: Communicator, rank: Rank, group_rank: Rank, default: Rank = None) -> Any:
    """The rank in the group that is given in one way or the other. default: rank of the world if it is not given"""
    if group_rank is None:
        rank = default if rank is None else rank
        return None if rank is None else get_group_rank(comm, rank)
    if rank is not None:
        raise _error(f"either rank {rank} of the world or rank {group_rank} in the group should be given, not both")
    return group_rank


def _collective(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a collective warn and return None on ranks outside the group, as PyTorch's do."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except _NotAMemberError:
            text = f"Running {function.__name__} on global rank {get_rank()} which does not belong to the given group."
            warnings.warn(text, stacklevel=2)
            return None

    return call


# Tensors -------------------------------------------------------------------------------------------------------------


def _written(tensor: Tensor) -> Tensor:
    """The tensor that a collective writes, as one that autograd does not follow; backward will see the write."""
    tensor.version.count += 1
    return tensor.detach()


def _check(name: str, tensor: Any, like: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raises: ArgumentError unless it is a tensor of the dtype and device of `like`, in one of the shapes."""
    given = type(tensor).__name__
    if isinstance(tensor, Tensor):
        if (tensor.dtype, tensor.device) == (like.dtype, like.device) and tensor.shape in shapes:
            return
        given = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    expected = " or ".join(map(str, dict.fromkeys(shapes)))
    raise _error(f"{name} should be {like.dtype} {expected} on {like.device}, is {given}")


def _check_list(name: str, given: Sequence[Any] | None, length: int, like: Tensor | None = None) -> Sequence[Any]:
    """The list. Raises: ArgumentError unless it has that length, and its items are tensors like `like`, if given."""
    items = given or ()
    if len(items) != length:
        raise _error(f"{name} should have {length} items, has {len(items)}")
    if like is not None:
        for index, tensor in enumerate(items):
            _check(f"{name}[{index}]", tensor, like, tuple(like.shape))
    return items


def _parts(name: str, whole: Any, part: Tensor, size: int) -> Tensor:
    """`whole` as (size, *part.shape). Raises: ArgumentError unless it is `size` such parts, joined or stacked."""
    stacked = (size, *part.shape)
    joined = (size * len(part), *part.shape[1:]) if part.ndim else stacked
    _check(name, whole, part, joined, stacked)
    return whole.detach().view(stacked)


def _row(tensor: Tensor) -> Tensor:
    """The tensor as the only row of one, so that ranks compare its whole shape."""
    return tensor.detach().unsqueeze(0)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return stack([tensor.detach() for tensor in tensors])


@_collective
def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None) -> Work | None:
    """Returns when all ranks of the group have called it. device_ids: changes nothing"""
    return _finish(_comm(group).barrier(async_op=async_op), async_op)


@_collective
def all_reduce(tensor: Tensor, op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """Leaves the reduction of all ranks' tensors in each of them."""
    comm = _comm(group)
    x = _written(tensor)
    return _finish(comm.all_reduce(x, op, out=x, async_op=async_op), async_op)


@_collective
def broadcast(
    tensor: Tensor, src: Rank = None, group: Group = None, async_op: bool = False, group_src: Rank = None
) -> Work | None:
    """Writes the tensor of rank `src` into those of the others."""
    comm = _comm(group)
    root = _group_rank(comm, src, group_src, 0)
    return _finish(comm.broadcast(_written(tensor), root, async_op=async_op), async_op)


@_collective
def reduce(
    tensor: Tensor,
    dst: Rank = None,
    op: str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
) -> Work | None:
    """Leaves the reduction of all ranks' tensors in that of rank `dst`."""
    comm = _comm(group)
    root = _group_rank(comm, dst, group_dst, 0)
    x = _written(tensor) if comm.rank == root else tensor.detach()
    return _finish(comm.reduce(x, op, root, out=x, async_op=async_op), async_op)


@_collective
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Writes every rank's tensor into the list's, in the order of ranks; all are of one dtype and shape."""
    comm = _comm(group)
    outputs = _check_list("all_gather: tensor_list", tensor_list, comm.size, tensor)
    rows = tensor.new_empty((comm.size, *tensor.shape))
    work = comm.all_gather(_row(tensor), lengths="equal", out=rows, async_op=async_op)
    return _finish(work, async_op, outputs, rows)


@_collective
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Writes every rank's tensor into one, joined or stacked along its first dimension.

    input_tensor: (d0, ...), of one dtype and shape on all n ranks; output_tensor: (n * d0, ...) or (n, d0, ...)
    """
    comm = _comm(group)
    rows = _written(_parts("all_gather_into_tensor: output_tensor", output_tensor, input_tensor, comm.size))
    return _finish(comm.all_gather(_row(input_tensor), lengths="equal", out=rows, async_op=async_op), async_op)


@_collective
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
) -> Work | None:
    """Writes every rank's tensor into the list's of rank `dst`; all are of one dtype and shape.

    gather_list: one tensor a rank, read on rank `dst` only
    """
    comm = _comm(group)
    root = _group_rank(comm, dst, group_dst, 0)
    outputs: Sequence[Tensor] = ()
    rows: Any = ()
    if comm.rank == root:
        outputs = _check_list("gather: gather_list", gather_list, comm.size, tensor)
        rows = tensor.new_empty((comm.size, *tensor.shape))
    work = comm.gather(_row(tensor), root, lengths="equal", out=rows, async_op=async_op)
    return _finish(work, async_op, outputs, rows)


@_collective
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Rank = None,
) -> Work | None:
    """Writes tensor r of the list of rank `src` into the tensor of rank r; all are of one dtype and shape.

    scatter_list: one tensor a rank, read on rank `src` only
    """
    comm = _comm(group)
    root = _group_rank(comm, src, group_src, 0)
    rows = None
    if comm.rank == root:
        rows = _stack(_check_list("scatter: scatter_list", scatter_list, comm.size, tensor))
    return _finish(comm.scatter(rows, root, out=_row(_written(tensor)), async_op=async_op), async_op)


@_collective
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Leaves on rank r the reduction of tensor r of all ranks' lists; all are of one dtype and shape."""
    tensors = _check_list("reduce_scatter: input_list", input_list, _comm(group).size, output)
    return reduce_scatter_tensor(output, _stack(tensors), op, group, async_op)


@_collective
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Leaves on rank r the reduction of part r of all ranks' tensors, of parts joined or stacked.

    output: (d0, ...), of one dtype and shape on all n ranks; input: (n * d0, ...) or (n, d0, ...)
    """
    comm = _comm(group)
    parts = _parts("reduce_scatter_tensor: input", input, output, comm.size)
    return _finish(comm.reduce_scatter(parts, op, out=_row(_written(output)), async_op=async_op), async_op)


all_gather_single = all_gather_into_tensor  # PyTorch 2.13's names
reduce_scatter_single = reduce_scatter_tensor


@_collective
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Sends part r of the input to rank r, and joins in the output the parts that come from all ranks.

    input: (n, ...), output: (m, ...), of one dtype
    output_split_sizes, input_split_sizes: the rows from and to each rank; None: the same number for all
    """
    comm = _comm(group)
    _check("all_to_all_single: output", output, input, (*output.shape[:1], *input.shape[1:]))
    work = comm.all_to_all(
        input.detach(),
        lengths=input_split_sizes or _even(input, comm),
        out_lengths=output_split_sizes or _even(output, comm),
        out=_written(output),
        async_op=async_op,
    )
    return _finish(work, async_op)


def _even(tensor: Tensor, comm: Communicator) -> list[int]:
    """As many rows for every rank; that they add up to all rows is checked where they are used."""
    return [len(tensor) // comm.size] * comm.size


# Point to point ------------------------------------------------------------------------------------------------------


@_collective
def send(tensor: Tensor, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None) -> None:
    """Sends a tensor to rank `dst`, which receives it with `recv` or `irecv`."""
    comm = _comm(group)
    comm.send(tensor.detach(), _group_rank(comm, dst, group_dst), tag=tag)


@_collective
def isend(tensor: Tensor, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None) -> Work:
    """Starts to send a tensor to rank `dst`, which receives it with `recv` or `irecv`."""
    comm = _comm(group)
    return Work(comm.send(tensor.detach(), _group_rank(comm, dst, group_dst), tag=tag, async_op=True))


@_collective
def irecv(tensor: Tensor, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None) -> Work:
    """Starts to receive into a tensor what rank `src` sends, of its dtype and shape; without `src`, any rank."""
    comm = _comm(group)
    return Work(comm.recv(_group_rank(comm, src, group_src), tag=tag, out=_written(tensor), async_op=True))


def recv(tensor: Tensor, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None) -> int:
    """Receives into a tensor what rank `src` sends, of its dtype and shape; without `src`, any rank.

    Returns: the sender's rank in the world; -1 on a rank outside the group
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        irecv(tensor, src, group)  # warns
        return -1
    comm = _comm(group)
    source = _group_rank(comm, src, group_src)
    received = comm.recv(source, tag=tag, out=_written(tensor))
    return comm.ranks[received[1] if source is None else source]


class P2POp(NamedTuple):
    """A send or receive for `batch_isend_irecv`.

    op: `isend` or `irecv`; peer, group_peer: the other rank, of the world or in the group
    """

    op: Callable[..., Work | None]
    tensor: Tensor
    peer: Rank = None
    group: Group = None
    tag: int = 0
    group_peer: Rank = None


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts all these sends and receives."""
    works = [op(*arguments) for op, *arguments in p2p_op_list]
    return [work for work in works if work is not None]


# Objects -------------------------------------------------------------------------------------------------------------


def _fill(name: str, object_list: list[Any] | None, received: list[Any]) -> None:
    """Writes what was received into the list. Raises: ArgumentError unless it is as long."""
    _check_list(name, object_list, len(received))
    if object_list is not None:
        object_list[:] = received


@_collective
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Writes every rank's object into the list, in the order of ranks. It is pickled between them."""
    _fill("all_gather_object: object_list", object_list, _comm(group).all_gather_object(obj))


@_collective
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: Rank = None,
    group: Group = None,
    group_dst: Rank = None,
) -> None:
    """Writes every rank's object into the list of rank `dst`, in the order of ranks. It is pickled between them."""
    comm = _comm(group)
    objects = comm.gather_object(obj, _group_rank(comm, dst, group_dst, 0))
    if objects is not None:
        _fill("gather_object: object_gather_list", object_gather_list, objects)


@_collective
def broadcast_object_list(
    object_list: list[Any], src: Rank = None, group: Group = None, device: Any = None, group_src: Rank = None
) -> None:
    """Writes the objects of rank `src` into the lists of the others, which are as long. They are pickled between them.

    device: changes nothing
    """
    comm = _comm(group)
    objects = comm.broadcast_object(list(object_list), _group_rank(comm, src, group_src, 0))
    _fill("broadcast_object_list: object_list", object_list, objects)


@_collective
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: Rank = None,
    group: Group = None,
    group_src: Rank = None,
) -> None:
    """Writes object r of the input list of rank `src` into the first place of rank r's output list, pickled on the way.

    scatter_object_input_list: one object a rank, read on rank `src` only
    """
    comm = _comm(group)
    received = comm.scatter_object(scatter_object_input_list, _group_rank(comm, src, group_src, 0))
    scatter_object_output_list[0] = received
