"""PyTorch's process group functions, as calls of a communicator: for scripts that were written for PyTorch's DDP.

The ranks are those of `collectives.init()`. A group is a communicator, from `new_group`, or from `split` or
`create_group` of another communicator; None and `group.WORLD` stand for all ranks. As in PyTorch, `src` and `dst` are
ranks of the world whatever the group is, and `group_src` and `group_dst` are ranks in the group; without either, the
root is rank 0 of the world. On a rank outside the group a collective warns and does nothing.

An output must have the dtype, shape and device of the data that arrive in it. Otherwise the call raises an
ArgumentError, which is a ValueError: `collectives.ArgumentError` if the communicator makes the check, and
`ddp.errors.ArgumentError` if this module does. If the tensors of different ranks do not fit together, a collective
raises `collectives.MismatchError`, as far as the ranks compare their calls (see `collectives.init`). Calls with
`async_op=True` return a `Work` at once. New code should call the communicator: see docs/collectives.md.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec

import collectives
from collectives import Communicator
from ddp._tensor.core import Tensor
from ddp._tensor.functions import stack
from ddp.errors import ArgumentError, ParallelError

__all__ = ["GroupMember", "ReduceOp", "Work", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"]
__all__ += ["all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "destroy_process_group", "gather"]
__all__ += ["get_backend", "get_global_rank", "get_group_rank", "get_process_group_ranks", "get_rank", "get_world_size"]
__all__ += ["group", "init_process_group", "irecv", "is_available", "is_initialized", "isend", "new_group", "recv"]
__all__ += ["reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"]

P = ParamSpec("P")
#: A communicator; None: all ranks; GroupMember.NON_GROUP_MEMBER: a group without this rank.
Group = Communicator | int | None
#: A rank; None: the argument was not given.
Rank = int | None
#: A time limit in seconds or as a timedelta; None: the communicator's time limit.
Timeout = timedelta | float | None

_initialized = False


class ReduceOp:
    """The names of reductions."""

    SUM = "sum"
    AVG = "mean"
    PRODUCT = "prod"
    MIN = "min"
    MAX = "max"


class GroupMember:
    """Values that stand for a group.

    WORLD: the group of all ranks, written as None
    NON_GROUP_MEMBER: what `new_group` returns on a rank outside the new group
    """

    WORLD = None
    NON_GROUP_MEMBER = -100


group = GroupMember  # PyTorch has group.WORLD, too


class Work:
    """A collective, send or receive in progress: the result of `isend`, `irecv` and calls with `async_op=True`.

    Until `wait` returns or `is_completed` returns True, do not change its tensors, and do not read its outputs.
    """

    def __init__(self, work: collectives.Work[Any], outputs: Sequence[Tensor] = ()) -> None:
        """outputs: row i of the result is copied to outputs[i]"""
        self._work = work
        self._outputs = outputs

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits until the outputs can be used. Returns True.

        timeout: a time limit for this call of `wait`; the time limit of the collective applies as well
        Raises: CollectiveTimeout if the outputs cannot be used in time; the error that ended the collective, if any.
        """
        _copy_rows(self._work.wait(_seconds(timeout)), self._outputs)
        self._outputs = ()  # a second call copies nothing: the outputs may have changed
        return True

    def is_completed(self) -> bool:
        """Whether the outputs can be used. Raises: the error that ended the collective, if any."""
        return self._work.done() and self.wait()


def _copy_rows(rows: Any, outputs: Sequence[Tensor]) -> None:
    for index, output in enumerate(outputs):
        _written(output).copy_(rows[index])


def _copied(result: Any, outputs: Sequence[Tensor]) -> Work | None:
    """Copies the rows of a result to the outputs. For a `collectives.Work`, returns a Work whose `wait` does so."""
    if isinstance(result, collectives.Work):
        return Work(result, outputs)
    _copy_rows(result, outputs)
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
    """Joins the world, as `collectives.init()` does. Collective.

    backend: for "nccl", or a name that contains it, the call raises if a rank cannot use NCCL; None, "gloo" and other
        names mean "auto" in `collectives.init`
    timeout: the time limit of every collective, in seconds or as a timedelta; None: 600 s. Has no effect if this
        process has joined the world before
    world_size: is checked, if given here or as WORLD_SIZE in the environment, but not used: the launcher decides it
    rank: is checked, if given here, but not used

    init_method and other arguments change nothing: the launcher decides how ranks meet.

    Raises: ParallelError if the world has another size, or this process another rank; ValueError if WORLD_SIZE is not
    an integer; what `collectives.init` raises.
    """
    global _initialized
    name = "nccl" if "nccl" in (backend or "") else "auto"
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
    """Makes a group of some of the ranks. All its members must call this. Other ranks may call it, too, as in PyTorch.

    ranks: of the world, the same on every rank; None: all
    timeout: the time limit of every collective of the group, in seconds or as a timedelta; None: the world's time limit
    sort_ranks: the group has its ranks in ascending order; False: in the order of `ranks`
    Other arguments change nothing: a group uses the backend of the world.

    Returns: the group on its members, GroupMember.NON_GROUP_MEMBER elsewhere
    Raises: `ddp.errors.ArgumentError` if a rank does not exist; on the members, `collectives.ArgumentError` if `ranks`
    has a rank twice or timeout is not above 0, and CollectiveTimeout if not all members call it with the same ranks.
    """
    world = collectives.init()
    members = [get_global_rank(world, rank) for rank in (world.ranks if ranks is None else ranks)]
    if world.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    return world.create_group(sorted(members) if sort_ranks else members, timeout=_seconds(timeout))


def destroy_process_group(group: Group = None) -> None:
    """Closes a group. Without a group, only `is_initialized` changes: the world lives until the process ends."""
    global _initialized
    if group is None:
        _initialized = False
    elif isinstance(group, Communicator):
        group.close()


def is_available() -> bool:
    """Returns True."""
    return True


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and `destroy_process_group()` without a group was not called since."""
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
    """This process's rank in the group, -1 if it is not a member."""
    return -1 if group == GroupMember.NON_GROUP_MEMBER else _comm(group).rank


def get_world_size(group: Group = None) -> int:
    """The number of ranks in the group, -1 if this process is not a member."""
    return -1 if group == GroupMember.NON_GROUP_MEMBER else _comm(group).size


def get_backend(group: Group = None) -> str:
    """The backend: "mpi", "single" for one rank, "threads", or "nccl" if that was requested by name.

    Raises: ArgumentError if this process is not a member of the group.
    """
    return _comm(group).backend


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The ranks of the group as ranks of the world, in the group's order.

    Raises: ArgumentError if this process is not a member of the group.
    """
    return list(_comm(group).ranks)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Converts a rank in the group to a rank of the world. Raises: ArgumentError if the group has no such rank."""
    ranks = get_process_group_ranks(group)
    if group_rank not in range(len(ranks)):
        raise _error(f"rank {group_rank} is not in the group, whose ranks are 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def get_group_rank(group: Group, global_rank: int) -> int:
    """Converts a rank of the world to a rank in the group. Raises: ArgumentError if it is not in the group."""
    ranks = get_process_group_ranks(group)
    if global_rank not in ranks:
        raise _error(f"rank {global_rank} of the world is not in the group, which has its ranks {ranks}")
    return ranks.index(global_rank)


def _comm_and_rank(group: Group, rank: Rank, group_rank: Rank, default: Rank = None) -> tuple[Communicator, Any]:
    """The group's communicator, and a rank in it. rank: in the world; group_rank: in the group; only one may be given

    default: stands for `rank` if neither is given; if `default` is None, None is returned as the rank
    """
    comm = _comm(group)
    if group_rank is None:
        rank = default if rank is None else rank
        return comm, None if rank is None else get_group_rank(comm, rank)
    if rank is not None:
        raise _error(f"either rank {rank} of the world or rank {group_rank} in the group should be given, not both")
    return comm, group_rank


def _collective(function: Callable[P, Any]) -> Callable[P, Work | None]:
    """Wraps a function so that it returns a Work or None, as PyTorch's collectives do, and warns outside the group.

    function: returns the result or the `collectives.Work` of the communicator, or a Work of this module
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Work | None:
        try:
            result = function(*args, **kwargs)
        except _NotAMemberError as error:
            warnings.warn(f"{function.__name__} does nothing: {error}", stacklevel=2)
            return None
        if isinstance(result, collectives.Work):
            return Work(result)
        return result if isinstance(result, Work) else None

    return call


# Tensors -------------------------------------------------------------------------------------------------------------


def _detached(tensor: Any) -> Tensor:
    """The tensor outside the graph. Raises: ArgumentError if it is not a tensor."""
    if not isinstance(tensor, Tensor):
        raise _error(f"expected a tensor, got {type(tensor).__name__}")
    return tensor.detach()


def _written(tensor: Any) -> Tensor:
    """Detaches a tensor that a collective writes. Its version is incremented, so that backward notices the write."""
    x = _detached(tensor)
    x.version.count += 1
    return x


def _check(name: str, tensor: Any, like: Tensor, *shapes: tuple[int, ...]) -> None:
    """Checks a tensor. Raises: ArgumentError unless it has the dtype and device of `like` and one of the shapes."""
    if not isinstance(tensor, Tensor):
        raise _error(f"{name} should be a tensor, is {type(tensor).__name__}")
    if (tensor.dtype, tensor.device) != (like.dtype, like.device) or tensor.shape not in shapes:
        raise _error(
            f"{name} should be {like.dtype} {' or '.join(map(str, shapes))} on {like.device}, "
            f"is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )


def _check_length(name: str, items: Any, length: int) -> None:
    """Checks a list. Raises: ArgumentError unless it has `length` items; None counts as an empty list."""
    if not isinstance(items, Sequence | None):
        raise _error(f"{name} should be a list, is {type(items).__name__}")
    count = len(items or ())
    if count != length:
        raise _error(f"{name} should have {length} items, has {count}")


def _check_tensors(name: str, tensors: Any, length: int, like: Tensor) -> Any:
    """Returns `tensors`. Raises: ArgumentError unless it has `length` tensors of `like`'s dtype, shape and device."""
    _check_length(name, tensors, length)
    shape = tuple(_detached(like).shape)
    for index, tensor in enumerate(tensors):
        _check(f"{name}[{index}]", tensor, like, shape)
    return tensors


def _parts(name: str, whole: Any, part: Tensor, size: int) -> Tensor:
    """Returns a view of `whole` of shape (size, *part.shape).

    Raises: ArgumentError unless `whole` has `size` parts like `part`, joined along the first dimension or stacked.
    """
    stacked = (size, *_detached(part).shape)
    joined = (size * len(part), *part.shape[1:]) if part.ndim else stacked
    _check(name, whole, part, joined, stacked)
    return whole.detach().view(stacked)


def _row(tensor: Tensor) -> Tensor:
    """The tensor with a first axis of length 1, so that ranks compare its whole shape."""
    return _detached(tensor).unsqueeze(0)


@_collective
def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None, timeout: Timeout = None) -> Any:
    """Waits until all ranks of the group have called it.

    device_ids: changes nothing
    timeout: the time limit of this barrier, in seconds or as a timedelta; None: the group's time limit.
        If it is exceeded, the group is broken

    Raises: ArgumentError if timeout is not a time above 0.
    """
    return _comm(group).barrier(async_op=async_op, timeout=_seconds(timeout))


@_collective
def all_reduce(tensor: Tensor, op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduces the tensors of all ranks, and writes the result to each of them."""
    comm = _comm(group)
    x = _written(tensor)
    return comm.all_reduce(x, op, out=x, async_op=async_op)


@_collective
def broadcast(
    tensor: Tensor, src: Rank = None, group: Group = None, async_op: bool = False, group_src: Rank = None
) -> Any:
    """Writes the tensor of rank `src` into the tensors of the other ranks."""
    comm, root = _comm_and_rank(group, src, group_src, 0)
    return comm.broadcast(_written(tensor), root, async_op=async_op)


@_collective
def reduce(
    tensor: Tensor,
    dst: Rank = None,
    op: str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
) -> Any:
    """Reduces the tensors of all ranks, and writes the result to the tensor of rank `dst`."""
    comm, root = _comm_and_rank(group, dst, group_dst, 0)
    x = _written(tensor) if comm.rank == root else _detached(tensor)
    return comm.reduce(x, op, root, out=x, async_op=async_op)


@_collective
def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Writes the tensors of all ranks into the tensors of the list, in the order of ranks.

    All tensors have the same dtype and shape.
    """
    comm = _comm(group)
    outputs = _check_tensors("all_gather: tensor_list", tensor_list, comm.size, tensor)
    return _copied(comm.all_gather(_row(tensor), lengths="equal", async_op=async_op), outputs)


@_collective
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Writes the tensors of all ranks into one tensor, joined along the first dimension or stacked.

    input_tensor: (d0, ...), of one dtype and shape on all n ranks; output_tensor: (n * d0, ...) or (n, d0, ...)
    """
    comm = _comm(group)
    rows = _written(_parts("all_gather_into_tensor: output_tensor", output_tensor, input_tensor, comm.size))
    return comm.all_gather(_row(input_tensor), lengths="equal", out=rows, async_op=async_op)


@_collective
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
) -> Any:
    """Writes the tensors of all ranks into the tensors of `gather_list` on rank `dst`, in the order of ranks.

    gather_list: a tensor for each rank, read on rank `dst` only; all have one dtype and shape
    """
    comm, root = _comm_and_rank(group, dst, group_dst, 0)
    # Only the root reads the list, as in PyTorch.
    outputs = _check_tensors("gather: gather_list", gather_list, comm.size, tensor) if comm.rank == root else ()
    return _copied(comm.gather(_row(tensor), root, lengths="equal", async_op=async_op), outputs)


@_collective
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Rank = None,
) -> Any:
    """Writes tensor r of `scatter_list` on rank `src` into the tensor of rank r.

    scatter_list: a tensor for each rank, read on rank `src` only; all have one dtype and shape
    """
    comm, root = _comm_and_rank(group, src, group_src, 0)
    rows = None
    if comm.rank == root:
        rows = stack(_check_tensors("scatter: scatter_list", scatter_list, comm.size, tensor)).detach()
    return comm.scatter(rows, root, out=_row(_written(tensor)), async_op=async_op)


@_collective
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduces tensor r of all ranks' lists into `output` on rank r. All tensors have the same dtype and shape."""
    tensors = _check_tensors("reduce_scatter: input_list", input_list, _comm(group).size, output)
    return reduce_scatter_tensor(output, stack(tensors), op, group, async_op)


@_collective
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduces part r of all ranks' inputs into `output` on rank r. An input is n parts, joined or stacked.

    output: (d0, ...), of one dtype and shape on all n ranks; input: (n * d0, ...) or (n, d0, ...)
    """
    comm = _comm(group)
    parts = _parts("reduce_scatter_tensor: input", input, output, comm.size)
    return comm.reduce_scatter(parts, op, out=_row(_written(output)), async_op=async_op)


@_collective
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends part r of the input to rank r, and writes the received parts to the output, in the order of ranks.

    input: (n, ...), output: (m, ...), of one dtype
    output_split_sizes, input_split_sizes: numbers of rows from and to each rank; None: equal numbers
    """
    comm = _comm(group)
    for name, tensor, sizes in (("output", output, output_split_sizes), ("input", input, input_split_sizes)):
        if not sizes and len(_detached(tensor)) % comm.size:
            raise _error(
                f"all_to_all_single: {name} has {len(tensor)} rows, which {comm.size} ranks cannot share equally"
            )
    return comm.all_to_all(
        _detached(input),
        lengths=input_split_sizes or None,
        out_lengths=output_split_sizes or None,
        out=_written(output),
        async_op=async_op,
    )


# Point to point ------------------------------------------------------------------------------------------------------


@_collective
def send(tensor: Tensor, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None) -> None:
    """Sends a tensor to rank `dst`, which calls `recv` or `irecv`. Raises: ArgumentError if no rank is given."""
    comm, peer = _comm_and_rank(group, dst, group_dst)
    comm.send(_detached(tensor), peer, tag=tag)


@_collective
def isend(tensor: Tensor, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None) -> Any:
    """Starts to send a tensor to rank `dst`, which calls `recv` or `irecv`. Raises: as `send`."""
    comm, peer = _comm_and_rank(group, dst, group_dst)
    return comm.send(_detached(tensor), peer, tag=tag, async_op=True)


@_collective
def irecv(tensor: Tensor, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None) -> Any:
    """Starts to receive a tensor from rank `src`, or without `src` from any rank.

    tensor: is written, and has the dtype and shape of the tensor that is sent
    """
    comm, peer = _comm_and_rank(group, src, group_src)
    return comm.recv(peer, tag=tag, out=_written(tensor), async_op=True)


def recv(tensor: Tensor, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None) -> int:
    """Receives a tensor from rank `src`, or without `src` from any rank.

    tensor: is written, and has the dtype and shape of the tensor that is sent
    Returns: the sender's rank in the world; -1 on a rank outside the group
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        irecv(tensor, src, group)  # warns
        return -1
    comm, peer = _comm_and_rank(group, src, group_src)
    received = comm.recv(peer, tag=tag, out=_written(tensor))
    return comm.ranks[received[1] if peer is None else peer]


# Objects -------------------------------------------------------------------------------------------------------------


def _fill(name: str, object_list: Any, received: list[Any]) -> None:
    """Writes the received objects into the list. Raises: ArgumentError if the list has another length."""
    if not isinstance(object_list, list):
        raise _error(f"{name} should be a list, is {type(object_list).__name__}")
    _check_length(name, object_list, len(received))
    object_list[:] = received


@_collective
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Writes the objects of all ranks into the list, in the order of ranks. Objects travel pickled.

    Raises: ArgumentError unless the list has as many items as the group has ranks.
    """
    _fill("all_gather_object: object_list", object_list, _comm(group).all_gather_object(obj))


@_collective
def broadcast_object_list(
    object_list: list[Any], src: Rank = None, group: Group = None, device: Any = None, group_src: Rank = None
) -> None:
    """Writes the objects of rank `src` into the lists of the other ranks, which have the same length.

    Objects travel pickled. Raises: ArgumentError on a rank whose list has another length.

    device: changes nothing
    """
    comm, root = _comm_and_rank(group, src, group_src, 0)
    _fill("broadcast_object_list: object_list", object_list, comm.broadcast_object(list(object_list), root))
