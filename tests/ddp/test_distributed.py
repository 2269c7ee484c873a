"""PyTorch's process group functions on our communicators."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import collectives
import ddp
from collectives import Communicator
from ddp import distributed
from ddp.errors import ArgumentError, ParallelError, VersionError


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    yield
    distributed.destroy_process_group()


def program(dist: Any, t: Any) -> list[Any]:
    """What a script for DDP does besides wrapping its model; all values but the rank are the same on every rank."""
    rank = dist.get_rank()
    size = dist.get_world_size()
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


def movements(dist: Any, t: Any, async_op: bool) -> dict[str, Any]:
    """What the calls that move or combine rows leave in their outputs on this rank."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    last = size - 1
    x = t.tensor([[rank + 1.0, 2.0]])
    parts = [t.tensor([10.0 * rank + other]) for other in range(size)]
    rows = [rank + other for other in range(size)]
    outputs = {
        "all_gather": [t.zeros(1, 2) for _ in range(size)],
        "all_gather_into_tensor": t.zeros(size, 2),
        "gather": [t.zeros(1, 2) for _ in range(size)] if rank == last else [],
        "scatter": t.zeros(1),
        "reduce_scatter": t.zeros(1),
        "reduce_scatter_tensor": t.zeros(1),
        "reduce": x.clone(),
        "broadcast": x.clone(),
        "all_to_all_single": t.zeros(size),
        "uneven": t.zeros(sum(rows)),
    }
    out: Any = outputs.__getitem__
    repeated = t.cat([part.repeat(n) for part, n in zip(parts, rows, strict=True)])
    works = [
        dist.all_gather(out("all_gather"), x, async_op=async_op),
        dist.all_gather_into_tensor(out("all_gather_into_tensor"), x, async_op=async_op),
        dist.gather(x, out("gather") or None, dst=last, async_op=async_op),
        dist.scatter(out("scatter"), parts if rank == last else None, src=last, async_op=async_op),
        dist.reduce_scatter(out("reduce_scatter"), parts, async_op=async_op),
        dist.reduce_scatter_tensor(out("reduce_scatter_tensor"), t.cat(parts), dist.ReduceOp.MAX, async_op=async_op),
        dist.reduce(out("reduce"), dst=0, async_op=async_op),
        dist.broadcast(out("broadcast"), group_src=last, async_op=async_op),
        dist.all_to_all_single(out("all_to_all_single"), t.cat(parts), async_op=async_op),
        dist.all_to_all_single(out("uneven"), repeated, rows, rows, async_op=async_op),
        dist.barrier(async_op=async_op, device_ids=[0]),
    ]
    if async_op:
        for work in works:
            work.wait()
    else:
        assert works == [None] * len(works)
    return {name: [row.tolist() for row in output] for name, output in outputs.items()}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of addresses and of destroying the group
def test_one_rank_agrees_with_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = [program(dist, torch), movements(dist, torch, False), movements(dist, torch, True)]
    finally:
        dist.destroy_process_group()
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert [
        program(distributed, ddp),
        movements(distributed, ddp, False),
        movements(distributed, ddp, True),
    ] == expected
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
    by_rank = collectives.run_threads(main, size, timeout=20)
    assert [values[:-1] for values in by_rank] == [expected] * size
    assert [values[-1] for values in by_rank] == [*rows[:-1], [sums, 2.0 * size]]


@pytest.mark.parametrize("async_op", [False, True])
def test_rows_move_between_ranks(async_op: bool) -> None:
    size = 3
    by_rank = collectives.run_threads(lambda comm: movements(distributed, ddp, async_op), size, timeout=20)
    ranks = range(size)
    everyones = [[rank + 1.0, 2.0] for rank in ranks]
    for rank in ranks:
        last = rank == size - 1
        assert by_rank[rank] == {
            "all_gather": [[row] for row in everyones],
            "all_gather_into_tensor": everyones,
            "gather": [[row] for row in everyones] if last else [],
            "scatter": [20.0 + rank],
            "reduce_scatter": [30.0 + 3 * rank],
            "reduce_scatter_tensor": [20.0 + rank],
            "reduce": [[6.0, 6.0] if rank == 0 else everyones[rank]],
            "broadcast": [everyones[-1]],
            "all_to_all_single": [10.0 * other + rank for other in ranks],
            "uneven": [10.0 * other + rank for other in ranks for _ in range(rank + other)],
        }


def test_parts_are_joined_or_stacked_wherever_they_lie() -> None:
    def main(comm: Communicator) -> list[Any]:
        x = ddp.full((2,), comm.rank + 0.5, dtype=ddp.bfloat16)
        stacked = ddp.zeros(2, 2, dtype=ddp.bfloat16).t()  # not contiguous
        joined = ddp.zeros(8, dtype=ddp.bfloat16)[::2]
        numbers = ddp.zeros(2, dtype=ddp.bfloat16)
        total = ddp.tensor(0.0, dtype=ddp.bfloat16)
        distributed.all_gather_into_tensor(stacked, x)
        distributed.all_gather_into_tensor(joined, x)
        distributed.all_gather_into_tensor(numbers, x[0])
        distributed.reduce_scatter_tensor(x, stacked)
        distributed.reduce_scatter_tensor(total, numbers)
        return [y.tolist() for y in (stacked, joined, numbers, x, total)]

    rows = [[0.5, 0.5], [1.5, 1.5]]
    assert collectives.run_threads(main, 2, timeout=20) == [
        [rows, [0.5, 0.5, 1.5, 1.5], [0.5, 1.5], [1.0, 1.0], 1.0],
        [rows, [0.5, 0.5, 1.5, 1.5], [0.5, 1.5], [3.0, 3.0], 3.0],
    ]


X = ddp.zeros(2, 3)
WRONG: dict[str, Any] = {
    "int64": X.long(),
    "float64": X.double(),
    "bfloat16": X.bfloat16(),
    "(3, 2)": X.t(),
    "(6,)": X.view(6),
    "(5, 2, 3)": X.expand(5, 2, 3),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_gather: tensor_list[1]", lambda wrong: distributed.all_gather([X.clone(), wrong], X)),
        ("all_gather_into_tensor: output_tensor", lambda wrong: distributed.all_gather_into_tensor(wrong, X)),
        ("gather: gather_list[1]", lambda wrong: distributed.gather(X, [X.clone(), wrong], dst=distributed.get_rank())),
        ("scatter: scatter_list[0]", lambda wrong: distributed.scatter(X, [wrong, X], src=distributed.get_rank())),
        ("reduce_scatter: input_list[0]", lambda wrong: distributed.reduce_scatter(X, [wrong, X])),
        ("reduce_scatter_tensor: input", lambda wrong: distributed.reduce_scatter_tensor(X, wrong)),
    ],
)
def test_a_tensor_unlike_what_arrives_in_it_is_an_error(name: str, call: Any) -> None:
    """It is neither cast nor broadcast: an int64 output of 1.7 would hold 1."""

    def main(comm: Communicator) -> None:
        for given, wrong in WRONG.items():
            expected = re.escape(f"rank {comm.rank}: {name} should be float32 (") + ".*, is .*" + re.escape(given)
            with pytest.raises(ArgumentError, match=expected):
                call(wrong)
        with pytest.raises(ArgumentError, match=re.escape(f"rank {comm.rank}: {name} should be a tensor, is ndarray")):
            call(X.numpy())
        comm.barrier()

    collectives.run_threads(main, 2, timeout=20)


def test_all_to_all_checks_both_sides() -> None:
    def main(comm: Communicator) -> None:
        dist = distributed
        x = ddp.ones(4, 2)
        with pytest.raises(collectives.ArgumentError, match=r"out should be float32 \(4, 2\), is int64"):
            dist.all_to_all_single(ddp.zeros(4, 2, dtype=ddp.int64), x)
        with pytest.raises(collectives.ArgumentError, match=r"expected rows \[3, 1\] from the ranks, and got \[2, 2\]"):
            dist.all_to_all_single(ddp.zeros(4, 2), x, [3, 1])
        with pytest.raises(ddp.errors.ArgumentError, match="input has 3 rows, which 2 ranks cannot share equally"):
            dist.all_to_all_single(x, x[:3])

    collectives.run_threads(main, 2, timeout=20)


def test_a_list_of_another_length_is_an_error() -> None:
    def main(comm: Communicator) -> None:
        dist = distributed
        rank = comm.rank
        x = ddp.zeros(2)
        for length in (0, 1, 3):
            for call in (
                lambda tensors: dist.all_gather(tensors, x),
                lambda tensors: dist.gather(x, tensors, dst=rank),
                lambda tensors: dist.scatter(x, tensors, src=rank),
                lambda tensors: dist.reduce_scatter(x, tensors),
                lambda objects: dist.all_gather_object(objects, 1),
            ):
                with pytest.raises(ArgumentError, match=f"rank {rank}: .*list should have 2 items, has {length}"):
                    call([x] * length)
        with pytest.raises(ArgumentError, match="gather_list should have 2 items, has 0"):
            dist.gather(x, dst=rank)
        if rank == 0:
            dist.broadcast_object_list([1, 2], src=0)
        else:
            with pytest.raises(ArgumentError, match=r"rank 1: .*_list should have 2 items, has 3"):
                dist.broadcast_object_list([1, 2, 3], src=0)

    collectives.run_threads(main, 2, timeout=20)


def test_an_asynchronous_list_is_written_once() -> None:
    def main(comm: Communicator) -> list[float]:
        x = ddp.tensor([comm.rank + 1.0])
        outputs = [ddp.zeros(1), ddp.zeros(1)]
        work = distributed.all_gather(outputs, x, async_op=True)
        assert work is not None
        while not work.is_completed():  # also without `wait` the outputs are there
            time.sleep(0.001)
        results = [output.item() for output in outputs]
        outputs[0].zero_()
        assert work.wait(timedelta(seconds=5))
        assert outputs[0].item() == 0.0
        return results

    assert collectives.run_threads(main, 2, timeout=20) == [[1.0, 2.0]] * 2


def test_messages_between_two_ranks() -> None:
    def main(comm: Communicator) -> list[Any]:
        dist = distributed
        rank = comm.rank
        x = ddp.tensor([rank + 1.0])
        y = ddp.zeros(1)
        z = ddp.zeros(1)
        if rank == 0:
            dist.send(x, dst=1, tag=3)
            sender = dist.recv(y)
        else:
            sender = dist.recv(y, src=0, tag=3)
            dist.send(x, group_dst=0)
        works = [dist.isend(x, 1 - rank), dist.irecv(z, 1 - rank)]
        assert all(work.wait() for work in works)
        twice = [dist.isend(x.double(), 1 - rank), dist.irecv(z, 1 - rank)]
        assert twice[0].wait()
        with pytest.raises(collectives.ArgumentError, match=r"out should be float64 \(1,\), is float32 \(1,\)"):
            twice[1].wait()
        with pytest.raises(collectives.ArgumentError, match="dst should be a rank from 0 to 1, is None"):
            dist.send(x)
        return [sender, y.item(), z.item()]

    assert collectives.run_threads(main, 2, timeout=20) == [[1, 2.0, 2.0], [0, 1.0, 1.0]]


def test_the_root_of_a_group_is_a_rank_of_the_world() -> None:
    """Or, as group_src and group_dst, a rank in the group; other ranks may be left out of making it."""

    def main(comm: Communicator) -> list[Any]:
        dist = distributed
        rank = comm.rank
        if rank == 0:
            return []
        sorted_group = dist.new_group([2, 1])
        group = dist.new_group([2, 1], timedelta(seconds=9), sort_ranks=False)
        assert dist.get_process_group_ranks(sorted_group) == [1, 2]
        assert dist.get_process_group_ranks(group) == [2, 1]
        assert [dist.get_global_rank(group, 0), dist.get_group_rank(group, 1)] == [2, 1]
        assert isinstance(group, Communicator)
        assert (dist.get_rank(group), dist.get_world_size(group), group.timeout) == (2 - rank, 2, 9.0)
        x, y, z, total, message = (ddp.tensor([float(rank)]) for _ in range(5))
        dist.all_reduce(total, group=group)
        assert total.item() == 3.0
        dist.broadcast(x, src=1, group=group)
        dist.broadcast(y, group_src=0, group=group)
        dist.reduce(z, dst=2, group=group)
        if rank == 1:
            dist.send(message, dst=2, group=group)
            sender = 1
        else:
            sender = dist.recv(message, group=group)
        for given in ({}, {"src": 0}, {"src": 3}):
            with pytest.raises(ArgumentError, match=r"rank \d of the world is not in the group, which has .* \[2, 1\]"):
                dist.broadcast(x, group=group, **given)
        with pytest.raises(ArgumentError, match="not both"):
            dist.broadcast(x, src=1, group=group, group_src=0)
        with pytest.raises(collectives.ArgumentError, match="root should be a rank from 0 to 1, is 2"):
            dist.broadcast(x, group=group, group_src=2)
        with pytest.raises(ArgumentError, match="rank 2 is not in the group, whose ranks are 0 to 1"):
            dist.get_global_rank(group, 2)
        dist.destroy_process_group(group)
        with pytest.raises(collectives.CommunicatorClosed):
            dist.barrier(group)
        return [x.item(), y.item(), z.item(), message.item(), sender]

    assert collectives.run_threads(main, 3, timeout=20) == [[], [1.0, 2.0, 1.0, 1.0, 1], [1.0, 2.0, 3.0, 1.0, 1]]


def test_a_rank_outside_a_group_does_nothing() -> None:
    dist = distributed

    def main(comm: Communicator) -> None:
        for ranks in ([0, 2], [-1]):
            with pytest.raises(ArgumentError, match="is not in the group, whose ranks are 0 to 1"):
                dist.new_group(ranks)
        group = dist.new_group([0], None, "gloo", use_local_synchronization=comm.rank == 0)
        if comm.rank == 0:
            assert dist.get_rank(group) == 0
            return
        assert group == dist.GroupMember.NON_GROUP_MEMBER == -100
        assert dist.get_rank(group) == dist.get_world_size(group) == -1
        x = ddp.ones(1)
        calls: dict[str, Any] = {
            "barrier": lambda: dist.barrier(group),
            "all_reduce": lambda: dist.all_reduce(x, group=group, async_op=True),
            "broadcast": lambda: dist.broadcast(x, 0, group),
            "reduce": lambda: dist.reduce(x, 0, group=group),
            "all_gather": lambda: dist.all_gather([x], x, group),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, x, group),
            "gather": lambda: dist.gather(x, [x], 0, group),
            "scatter": lambda: dist.scatter(x, [x], 0, group),
            "reduce_scatter": lambda: dist.reduce_scatter(x, [x], group=group),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, x, group=group),
            "all_to_all_single": lambda: dist.all_to_all_single(x, x, group=group),
            "send": lambda: dist.send(x, 0, group),
            "isend": lambda: dist.isend(x, 0, group),
            "irecv": lambda: dist.irecv(x, 0, group),
            "all_gather_object": lambda: dist.all_gather_object([None], 1, group),
            "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0, group),
        }
        for name, call in calls.items():
            with pytest.warns(UserWarning, match=f"{name} does nothing: rank 1 is not a member"):
                assert call() is None
        with pytest.warns(UserWarning, match="irecv does nothing: rank 1 is not"):
            assert dist.recv(x, 0, group) == -1
        assert x.item() == 1.0
        with pytest.raises(ArgumentError, match="rank 1 is not a member of the group"):
            dist.get_backend(group)
        with pytest.raises(ArgumentError, match=r"group should be None or what new_group returned, is \[0, 1\]"):
            dist.all_reduce(x, group=[0, 1])  # type: ignore[arg-type]  # what is refused
        dist.destroy_process_group(group)

    collectives.run_threads(main, 2, timeout=20)


def test_the_group_of_all_ranks() -> None:
    distributed.init_process_group(timeout=60.0)
    world = distributed.group.WORLD
    assert distributed.get_process_group_ranks(world) == list(collectives.init().ranks)
    distributed.destroy_process_group(world)
    assert not distributed.is_initialized()
    collectives.init().barrier()  # is not closed


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
