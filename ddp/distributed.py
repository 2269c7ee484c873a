"""PyTorch's process group functions, as calls of a communicator: what a script needs that was written for DDP.

The ranks are those of `collectives.init()`. `group` is one of its communicators (None: all ranks), and `src` and `dst`
are ranks in it. New code calls the communicator, see docs/collectives.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import collectives
from collectives import Communicator, Work
from ddp._tensor.core import Tensor
from ddp._tensor.creation import from_numpy
from ddp.errors import ParallelError

__all__ = ["ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier"]
__all__ += ["broadcast", "broadcast_object_list", "destroy_process_group", "get_backend", "get_rank"]
__all__ += ["get_world_size", "init_process_group", "is_available", "is_initialized", "reduce"]

_initialized = False


class ReduceOp:
    """The names of reductions."""

    SUM, AVG, PRODUCT, MIN, MAX = "sum", "mean", "prod", "min", "max"


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
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
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 600.0 if timeout is None else timeout
    comm = collectives.init(name, seconds)
    asked = world_size if world_size != -1 else int(os.environ.get("WORLD_SIZE", comm.size))
    if asked != comm.size or rank not in (-1, comm.rank):
        raise ParallelError(
            f"init_process_group: {'a rank' if rank == -1 else f'rank {rank}'} of {asked} was expected, and this "
            f"process is rank {comm.rank} of {comm.size}; start the ranks with ddp-launch -n {asked}, mpiexec or srun"
        )
    _initialized = True


def destroy_process_group(group: Communicator | None = None) -> None:
    """Closes a group; of all ranks there is nothing to close before the process ends."""
    global _initialized
    if group is None:
        _initialized = False
    else:
        group.close()


def is_available() -> bool:
    """True."""
    return True


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and `destroy_process_group` not since."""
    return _initialized


def _comm(group: Communicator | None) -> Communicator:
    return collectives.init() if group is None else group


def get_rank(group: Communicator | None = None) -> int:
    """This process's rank."""
    return _comm(group).rank


def get_world_size(group: Communicator | None = None) -> int:
    """The number of ranks."""
    return _comm(group).size


def get_backend(group: Communicator | None = None) -> str:
    """What carries arrays of the CPU: "mpi", or "single" for one rank."""
    return _comm(group).backend


def barrier(group: Communicator | None = None, async_op: bool = False) -> Work[None] | None:
    """Returns when all ranks have called it."""
    work: Work[None] | None = _comm(group).barrier(async_op=async_op)
    return work


def _written(tensor: Tensor) -> Tensor:
    """The tensor that a collective writes, as one that autograd does not follow; backward will see the write."""
    tensor.version.count += 1
    return tensor.detach()


def all_reduce(
    tensor: Tensor, op: str = ReduceOp.SUM, group: Communicator | None = None, async_op: bool = False
) -> Work[Any] | None:
    """Leaves the reduction of all ranks' tensors in each of them."""
    x = _written(tensor)
    work = _comm(group).all_reduce(x, op, out=x, async_op=async_op)
    return work if async_op else None


def broadcast(
    tensor: Tensor, src: int = 0, group: Communicator | None = None, async_op: bool = False
) -> Work[Any] | None:
    """Writes the tensor of rank `src` into those of the others."""
    work = _comm(group).broadcast(_written(tensor), src, async_op=async_op)
    return work if async_op else None


def reduce(tensor: Tensor, dst: int = 0, op: str = ReduceOp.SUM, group: Communicator | None = None) -> None:
    """Leaves the reduction of all ranks' tensors in that of rank `dst`."""
    total = _comm(group).reduce(tensor.detach(), op, dst)
    if total is not None:
        _written(tensor).copy_(from_numpy(total))


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Communicator | None = None) -> None:
    """Writes every rank's tensor into the list's, in the order of ranks; all are of one shape."""
    rows = _comm(group).all_gather(tensor.detach().unsqueeze(0), lengths="equal")
    for out, row in zip(tensor_list, from_numpy(rows), strict=True):
        _written(out).copy_(row)


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: Communicator | None = None) -> None:
    """Writes every rank's tensor into one, joined or stacked along its first dimension."""
    rows = from_numpy(_comm(group).all_gather(input_tensor.detach().unsqueeze(0), lengths="equal"))
    _written(output_tensor).copy_(rows.reshape(output_tensor.shape))


def all_gather_object(object_list: list[Any], obj: Any, group: Communicator | None = None) -> None:
    """Writes every rank's object into the list, in the order of ranks. It is pickled between them."""
    object_list[:] = _comm(group).all_gather_object(obj)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Communicator | None = None) -> None:
    """Writes the objects of rank `src` into the lists of the others. They are pickled between them."""
    object_list[:] = _comm(group).broadcast_object(list(object_list), src)
