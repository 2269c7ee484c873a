"""PyTorch's process group functions on our communicators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import collectives
import ddp
from collectives import Communicator
from ddp import distributed
from ddp.errors import ParallelError, VersionError


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    yield
    distributed.destroy_process_group()


def program(dist: Any, t: Any) -> list[Any]:
    """What a script for DDP does besides wrapping its model; all values but the rank are the same on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = t.tensor([rank + 1.0, 2.0])
    total, largest, product = mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    work = dist.all_reduce(product, op=dist.ReduceOp.PRODUCT, async_op=True)
    work.wait()
    first = mine.clone()
    dist.broadcast(first, src=0)
    last = mine.clone()
    dist.reduce(last, dst=size - 1)
    parts = [t.zeros(2) for _ in range(size)]
    dist.all_gather(parts, mine)
    joined = t.zeros(2 * size)
    dist.all_gather_into_tensor(joined, mine)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    settings = [{"lr": 0.1}, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(settings, src=0)
    dist.barrier()
    tensors = [total, largest, product, first, *parts, joined]
    return [dist.is_initialized(), *(x.tolist() for x in tensors), objects, settings, last.tolist()]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of addresses and of destroying the group
def test_one_rank_agrees_with_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = program(dist, torch)
    finally:
        dist.destroy_process_group()
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert program(distributed, ddp) == expected
    assert distributed.is_available()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_on_ranks(size: int) -> None:
    def main(comm: Communicator) -> list[Any]:
        distributed.init_process_group(world_size=size, rank=comm.rank)
        return program(distributed, ddp)

    sums = size * (size + 1) / 2
    rows = [[rank + 1.0, 2.0] for rank in range(size)]
    expected = [
        True,
        [sums, 2.0 * size],
        [float(size), 2.0],
        [float(math.factorial(size)), 2.0**size],
        [1.0, 2.0],
        *rows,
        [number for row in rows for number in row],
        [{"rank": rank} for rank in range(size)],
        [{"lr": 0.1}, 0],
    ]
    found = collectives.run_threads(main, size, timeout=20)
    assert [values[:-1] for values in found] == [expected] * size
    assert [values[-1] for values in found] == [*rows[:-1], [sums, 2.0 * size]]


def test_a_group_is_a_communicator() -> None:
    def main(comm: Communicator) -> float:
        group = comm.split(comm.rank % 2)
        assert group is not None
        x = ddp.tensor(float(comm.rank))
        distributed.all_reduce(x, group=group)
        assert distributed.get_world_size(group) == 2
        distributed.destroy_process_group(group)
        return x.item()

    assert collectives.run_threads(main, 4, timeout=20) == [2.0, 4.0, 2.0, 4.0]


def test_backward_sees_the_write() -> None:
    x = ddp.ones(2, requires_grad=True)
    y = x * 1
    z = (y * y).sum()
    distributed.all_reduce(y)
    with pytest.raises(VersionError):
        z.backward()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_world_of_another_size_is_an_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is started by torchrun would otherwise train alone on every rank."""
    options: dict[str, Any] = {"world_size": 4, "rank": 1} if how == "argument" else {}
    if how == "environment":
        monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ParallelError, match=r"of 4 was expected, and this process is rank 0 of 1; .* ddp-launch -n 4"):
        distributed.init_process_group("gloo", **options)
    assert not distributed.is_initialized()
