"""PyTorch's process group functions on our communicators."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest

import collectives
import ddp
from collectives import Communicator
from ddp import distributed
from ddp.errors import ArgumentError, ParallelError, VersionError

T = TypeVar("T")


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    yield
    distributed.destroy_process_group()


def on_two_ranks(main: Callable[[Communicator], T]) -> list[T]:
    return collectives.run_threads(main, 2, timeout=20)


def program(dist: Any, t: Any) -> list[Any]:
    """What a script does besides wrapping its model and moving rows: the same on every rank."""
    rank = dist.get_rank()
    mine = t.tensor([rank + 1.0, 2.0])
    total = mine.clone()
    largest = mine.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(mine, op=dist.ReduceOp.PRODUCT, async_op=True).wait()
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": rank})
    settings = [{"lr": 0.1}, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(settings, src=0)
    return [dist.is_initialized(), total.tolist(), largest.tolist(), mine.tolist(), objects, settings]


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
    out = outputs.__getitem__
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
        dist.barrier(async_op=async_op, device_ids=[0], timeout=timedelta(seconds=60)),
    ]
    if async_op:
        for work in works:
            work.wait()
    else:
        assert works == [None] * len(works)
    return {name: [row.tolist() for row in output] for name, output in outputs.items()}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of addresses and of destroying the group
def test_one_rank_agrees_with_pytorch(torch: Any) -> None:
    def results(dist: Any, t: Any) -> list[Any]:
        return [program(dist, t), movements(dist, t, False), movements(dist, t, True)]

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = results(dist, torch)
    finally:
        dist.destroy_process_group()
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert results(distributed, ddp) == expected
    assert distributed.is_available()


def test_on_ranks() -> None:
    def main(comm: Communicator) -> list[Any]:
        distributed.init_process_group(world_size=3, rank=comm.rank)
        return program(distributed, ddp)

    objects = [{"rank": rank} for rank in range(3)]
    expected = [True, [6.0, 6.0], [3.0, 2.0], [6.0, 8.0], objects, [{"lr": 0.1}, 0]]
    assert collectives.run_threads(main, 3, timeout=20) == [expected] * 3


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
    def zeros(*shape: int) -> ddp.Tensor:
        return ddp.zeros(*shape, dtype=ddp.bfloat16)

    def main(comm: Communicator) -> list[Any]:
        x = zeros(2) + (comm.rank + 0.5)
        stacked = zeros(2, 2).t()  # not contiguous
        joined = zeros(8)[::2]
        numbers = zeros(2)
        total = ddp.tensor(0.0, dtype=ddp.bfloat16)
        for output, given in ((stacked, x), (joined, x), (numbers, x[0])):
            distributed.all_gather_into_tensor(output, given)
        distributed.reduce_scatter_tensor(x, stacked)
        distributed.reduce_scatter_tensor(total, numbers)
        return [y.tolist() for y in (stacked, joined, numbers, x, total)]

    gathered = [[[0.5, 0.5], [1.5, 1.5]], [0.5, 0.5, 1.5, 1.5], [0.5, 1.5]]
    assert on_two_ranks(main) == [[*gathered, [1.0, 1.0], 1.0], [*gathered, [3.0, 3.0], 3.0]]


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

    on_two_ranks(main)


@pytest.mark.parametrize("wrong", [X.numpy(), [[1.0, 2.0, 3.0]]])
@pytest.mark.parametrize(
    "call",
    [
        distributed.all_reduce,
        distributed.broadcast,
        distributed.reduce,
        distributed.send,
        distributed.isend,
        distributed.recv,
        lambda wrong: distributed.all_gather([X, X], wrong),
        lambda wrong: distributed.all_gather_into_tensor(X, wrong),
        lambda wrong: distributed.gather(wrong, [X, X], group_dst=distributed.get_rank()),
        lambda wrong: distributed.gather(wrong, group_dst=1 - distributed.get_rank()),
        lambda wrong: distributed.scatter(wrong, [X, X], group_src=distributed.get_rank()),
        lambda wrong: distributed.reduce_scatter(wrong, [X, X]),
        lambda wrong: distributed.reduce_scatter_tensor(wrong, X),
        lambda wrong: distributed.all_to_all_single(X[:2], wrong, [1, 1], [1, 1]),
        lambda wrong: distributed.all_to_all_single(X, wrong),
    ],
)
def test_what_is_no_tensor_is_an_error(call: Any, wrong: Any) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=f"rank {comm.rank}: expected a tensor, got {type(wrong).__name__}"):
            call(wrong)
        comm.barrier()

    on_two_ranks(main)


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

    on_two_ranks(main)


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
                with pytest.raises(ArgumentError, match=f"rank {rank}: .*list should be a list, is Tensor"):
                    call(x)
        with pytest.raises(ArgumentError, match="gather_list should have 2 items, has 0"):
            dist.gather(x, dst=rank)
        if rank == 0:
            dist.broadcast_object_list([1, 2], src=0)
        else:
            with pytest.raises(ArgumentError, match=r"rank 1: .*_list should have 2 items, has 3"):
                dist.broadcast_object_list([1, 2, 3], src=0)

    on_two_ranks(main)


def test_an_asynchronous_list_is_written_once() -> None:
    def main(comm: Communicator) -> list[float]:
        x = ddp.tensor([comm.rank + 1.0])
        outputs = [ddp.zeros(1), ddp.zeros(1)]
        work = distributed.all_gather(outputs, x, async_op=True)
        while not work.is_completed():  # also without `wait` the outputs are there
            time.sleep(0.001)
        results = [output.item() for output in outputs]
        outputs[0].zero_()
        assert work.wait(timedelta(seconds=5))
        assert outputs[0].item() == 0.0
        return results

    assert on_two_ranks(main) == [[1.0, 2.0]] * 2


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

    assert on_two_ranks(main) == [[1, 2.0, 2.0], [0, 1.0, 1.0]]


def test_the_root_of_a_group_is_a_rank_of_the_world() -> None:
    """Or, as group_src and group_dst, a rank in the group; other ranks may be left out of making it."""

    def main(comm: Communicator) -> list[Any]:
        dist = distributed
        rank = comm.rank
        if rank == 0:
            return []
        assert dist.get_process_group_ranks(dist.new_group([2, 1])) == [1, 2]
        group = dist.new_group([2, 1], timedelta(seconds=9), sort_ranks=False)
        assert dist.get_process_group_ranks(group) == [2, 1]
        assert [dist.get_global_rank(group, 0), dist.get_group_rank(group, 1)] == [2, 1]
        assert isinstance(group, Communicator)
        assert (dist.get_rank(group), dist.get_world_size(group), group.timeout) == (2 - rank, 2, 9.0)
        x, y, z, total, message = (ddp.tensor([float(rank)]) for _ in range(5))
        dist.all_reduce(total, group=group)
        dist.broadcast(x, src=1, group=group)
        dist.broadcast(y, group_src=0, group=group)
        dist.reduce(z, dst=2, group=group)
        if rank == 1:
            dist.send(message, dst=2, group=group)
        else:
            assert dist.recv(message, group=group) == 1
        for given, error in (
            ({}, r"rank 0 of the world is not in the group, which has .* \[2, 1\]"),
            ({"src": 3}, "rank 3 of the world is not in the group"),
            ({"src": 1, "group_src": 0}, "not both"),
            ({"group_src": 2}, "root should be a rank from 0 to 1, is 2"),
        ):
            with pytest.raises((ArgumentError, collectives.ArgumentError), match=error):
                dist.broadcast(x, group=group, **given)
        with pytest.raises(ArgumentError, match="rank 2 is not in the group, whose ranks are 0 to 1"):
            dist.get_global_rank(group, 2)
        dist.destroy_process_group(group)
        with pytest.raises(collectives.CommunicatorClosed):
            dist.barrier(group)
        return [each.item() for each in (x, y, z, total, message)]

    expected = [[], [1.0, 2.0, 1.0, 3.0, 1.0], [1.0, 2.0, 3.0, 3.0, 1.0]]
    assert collectives.run_threads(main, 3, timeout=20) == expected


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
        calls = {
            "barrier": [],
            "all_reduce": [x],
            "broadcast": [x, 0],
            "reduce": [x, 0],
            "all_gather": [[x], x],
            "all_gather_into_tensor": [x, x],
            "gather": [x, [x], 0],
            "scatter": [x, [x], 0],
            "reduce_scatter": [x, [x]],
            "reduce_scatter_tensor": [x, x],
            "all_to_all_single": [x, x],
            "send": [x, 0],
            "isend": [x, 0],
            "irecv": [x, 0],
            "all_gather_object": [[None], 1],
            "broadcast_object_list": [[1], 0],
        }
        for name, args in calls.items():
            with pytest.warns(UserWarning, match=f"{name} does nothing: rank 1 is not a member"):
                assert getattr(dist, name)(*args, group=group) is None
        with pytest.warns(UserWarning, match="irecv does nothing: rank 1 is not"):
            assert dist.recv(x, 0, group) == -1
        assert x.item() == 1.0
        with pytest.raises(ArgumentError, match="rank 1 is not a member of the group"):
            dist.get_backend(group)
        with pytest.raises(ArgumentError, match=r"group should be None or what new_group returned, is \[0, 1\]"):
            dist.all_reduce(x, group=[0, 1])  # type: ignore[arg-type]  # what is refused
        dist.destroy_process_group(group)

    on_two_ranks(main)


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


@pytest.mark.parametrize(
    ("options", "environ"),
    [({"world_size": 4, "rank": 1}, {}), ({}, {"WORLD_SIZE": "4"})],
    ids=["argument", "environment"],
)
def test_a_world_of_another_size_is_an_error(options: Any, environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is started by torchrun would otherwise train alone on every rank."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match=r"of 4 was expected, and this process is rank 0 of 1; .* ddp-launch -n 4"):
        distributed.init_process_group("gloo", **options)
    assert not distributed.is_initialized()
