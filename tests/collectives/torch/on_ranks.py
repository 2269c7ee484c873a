"""What two ranks run of `test_process_group.py`: every call on the backend "ddp", and PyTorch's wrappers over it."""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.engine.queue import CallQueue

pytestmark = pytest.mark.filterwarnings("ignore")  # of what PyTorch's own modules use of each other

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
BITS = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
REDUCTIONS = [
    *((op, dtype) for op in SUMS for dtype in (*FLOATS, *INTEGERS)),
    *((op, dtype) for op in ("MIN", "MAX") for dtype in (torch.bool,)),
    *((op, dtype) for op in BITS for dtype in INTEGERS),
    ("AVG", torch.float32),
    ("SUM", torch.complex64),
]


@pytest.fixture(scope="module")
def size() -> Iterator[int]:
    import collectives.torch  # noqa: F401

    dist.init_process_group("ddp")
    yield dist.get_world_size()
    dist.destroy_process_group()


def of_rank(rank: int, dtype: Any = torch.float32, shape: tuple[int, ...] = (3, 4)) -> Any:
    """What that rank brings."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape, generator=generator).to(dtype)


def reduced(op: str, parts: list[Any]) -> Any:
    if op == "AVG":
        return sum(parts) / len(parts)
    if parts[0].dtype is torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}[op]
    return functools.reduce((SUMS | BITS)[op], parts)


def all_parts(size: int, dtype: Any = torch.float32, shape: tuple[int, ...] = (3, 4)) -> list[Any]:
    return [of_rank(rank, dtype, shape) for rank in range(size)]


class TestRanks:
    @pytest.mark.parametrize(("op", "dtype"), [*REDUCTIONS, ("SUM", torch.bool), ("PRODUCT", torch.bool)])
    def test_reductions(self, size: int, op: str, dtype: Any) -> None:
        rank = dist.get_rank()
        number = getattr(dist.ReduceOp, op)
        parts = all_parts(size, dtype)
        total = reduced(op, parts)
        x = of_rank(rank, dtype)
        dist.all_reduce(x, number)
        torch.testing.assert_close(x, total)
        x = of_rank(rank, dtype)
        dist.reduce(x, 1, number)
        torch.testing.assert_close(x, total if rank == 1 else parts[rank])
        y = torch.empty(4, dtype=dtype)
        dist.reduce_scatter(y, list(of_rank(rank, dtype)[:size]), number)
        torch.testing.assert_close(y, total[rank])
        dist.reduce_scatter_tensor(y, of_rank(rank, dtype)[:size].clone(), number)
        torch.testing.assert_close(y, total[rank])

    def test_a_sum_of_multiples(self, size: int) -> None:
        x = torch.ones(3)
        try:
            op = dist._make_nccl_premul_sum(2.5)
        except AttributeError:
            pytest.skip("this PyTorch has no PREMUL_SUM")
        dist.all_reduce(x, op)
        assert x.tolist() == [2.5 * size] * 3

    @pytest.mark.parametrize(
        "layout",
        [
            lambda x: x,
            lambda x: x.T,
            lambda x: x[:, ::2],
            lambda x: x[1:, 1:],
            lambda x: x.reshape(1, 3, 2, 2).to(memory_format=torch.channels_last),
            lambda x: x[0, 0],
            lambda x: x[:0],
        ],
    )
    def test_tensors_of_any_layout(self, size: int, layout: Callable[[Any], Any]) -> None:
        before = of_rank(dist.get_rank())
        x = layout(before.clone())
        dist.all_reduce(x)
        torch.testing.assert_close(x, sum(map(layout, all_parts(size))))
        x = layout(before.clone())
        dist.broadcast(x, 1)
        torch.testing.assert_close(x, layout(of_rank(1)))

    @pytest.mark.parametrize("async_op", [False, True])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn]
    )
    def test_movements(self, size: int, dtype: Any, async_op: bool) -> None:
        rank = dist.get_rank()
        mine = of_rank(rank, dtype)
        parts = all_parts(size, dtype)

        def done(work: Any) -> None:
            if async_op:
                work.wait()

        def check(actual: Any, expected: Any) -> None:
            assert actual.reshape(-1).tolist() == expected.reshape(-1).tolist()

        outs = [torch.empty_like(mine) for _ in range(size)]
        done(dist.all_gather(outs, mine, async_op=async_op))
        check(torch.stack(outs), torch.stack(parts))
        whole = torch.empty(size * 3, 4, dtype=dtype)
        done(dist.all_gather_into_tensor(whole, mine, async_op=async_op))
        check(whole, torch.cat(parts))
        outs = [torch.empty_like(mine) for _ in range(size)]
        done(dist.gather(mine, outs if rank == 1 else None, 1, async_op=async_op))
        if rank == 1:
            check(torch.stack(outs), torch.stack(parts))
        y = torch.empty_like(mine)
        done(dist.scatter(y, parts if rank == 1 else None, 1, async_op=async_op))
        check(y, parts[rank])
        rows = [torch.empty_like(mine) for _ in range(size)]
        done(dist.all_to_all(rows, parts, async_op=async_op))
        check(torch.stack(rows), torch.stack([parts[rank]] * size))
        y = torch.empty(size * (rank + 1), 4, dtype=dtype)
        x = torch.cat([of_rank(rank, dtype, (each + 1, 4)) for each in range(size)])
        splits = [each + 1 for each in range(size)]
        done(dist.all_to_all_single(y, x, [rank + 1] * size, splits, async_op=async_op))
        check(y, torch.cat([of_rank(each, dtype, (rank + 1, 4)) for each in range(size)]))

    def test_coalesced_forms(self, size: int) -> None:
        rank = dist.get_rank()
        parts = all_parts(size)
        group = dist.group.WORLD
        xs = [of_rank(rank), of_rank(rank).double()]
        with dist._coalescing_manager(group):
            for x in xs:
                dist.all_reduce(x)
        wholes = [torch.empty(size * 3, 4) for _ in range(2)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for whole in wholes:
                dist.all_gather_into_tensor(whole, of_rank(rank))
        manager.wait()
        ys = [torch.empty(4) for _ in range(2)]
        with dist._coalescing_manager(group, torch.device("cpu")):
            for y in ys:
                dist.reduce_scatter_tensor(y, of_rank(rank)[:size].clone())
        for x, whole, y in zip(xs, wholes, ys, strict=True):
            torch.testing.assert_close(x, sum(parts).to(x.dtype))
            torch.testing.assert_close(whole, torch.cat(parts))
            torch.testing.assert_close(y, sum(parts)[rank])

    def test_sparse_tensors(self, size: int) -> None:
        dense = torch.diag(torch.arange(4.0) + dist.get_rank())
        x = dense.to_sparse()
        dist.all_reduce(x)
        expected = sum(torch.diag(torch.arange(4.0) + rank) for rank in range(size))
        torch.testing.assert_close(x.to_dense(), expected)

    @pytest.mark.parametrize(
        "make",
        [lambda step: step, pytest.param(functools.partial(torch.compile, backend="eager"), marks=pytest.mark.long)],
        ids=["eager", "compiled"],
    )
    def test_functional_collectives(self, size: int, make: Callable[[Any], Any]) -> None:
        import torch.distributed._functional_collectives as functional

        rank = dist.get_rank()
        group = dist.group.WORLD

        def step(x: Any) -> Any:
            total = functional.all_reduce(x, "sum", group)
            rows = functional.all_to_all_single(x[:size].contiguous(), None, None, group)
            own = functional.reduce_scatter_tensor(x[:size].contiguous(), "sum", 0, group)
            return total + 0, functional.all_gather_tensor(x, 0, group) + 0, rows + 0, own + 0

        parts = all_parts(size)
        expected = (
            sum(parts),
            torch.cat(parts),
            torch.stack([part[rank] for part in parts]),
            sum(parts)[rank : rank + 1],
        )
        torch.testing.assert_close(make(step)(of_rank(rank)), expected)

    def test_the_result_of_a_functional_collective_is_waited_for(self, size: int) -> None:
        import torch.distributed._functional_collectives as functional

        def total() -> Any:
            return functional.all_reduce(of_rank(dist.get_rank()), "sum", dist.group.WORLD)

        expected = sum(all_parts(size))
        x = total()
        dist.all_reduce(x)
        torch.testing.assert_close(x + 0, size * expected)
        outs = [torch.empty(3, 4) for _ in range(size)]
        dist.all_gather(outs, total())
        torch.testing.assert_close(outs, [expected] * size)

    def test_point_to_point(self, size: int) -> None:
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.arange(6.0), 1, tag=7)
            dist.isend(torch.ones(1 << 16), 1).wait()
        elif rank == 1:
            x = torch.empty(6)
            assert dist.recv(x, tag=7) == 0
            assert x.tolist() == list(range(6))
            y = torch.empty(1 << 16)
            dist.irecv(y, 0).wait()
            assert y.sum() == 1 << 16
        following = (rank + 1) % size
        before = (rank - 1) % size
        x = torch.empty(5)
        sends = dist.P2POp(dist.isend, torch.full((5,), float(rank)), following)
        for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, x, before)]):
            work.wait()
        assert x.tolist() == [before] * 5

    def test_futures(self, size: int) -> None:
        rank = dist.get_rank()
        x = of_rank(rank)
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda done: 2 * done.value()[0])
        torch.testing.assert_close(doubled.wait(), 2 * sum(all_parts(size)))
        if rank == 1:
            y = torch.empty(3)
            received = dist.irecv(y, 0).get_future()  # of what is sent only later
            dist.send(torch.ones(1), 0)
            assert received.wait()[0].tolist() == [7, 7, 7]
        elif rank == 0:
            dist.recv(torch.empty(1), 1)
            dist.send(torch.full((3,), 7.0), 1)
        work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
        with pytest.raises(RuntimeError, match="different calls"):
            work.get_future().wait()
        assert isinstance(work.exception(), RuntimeError)
        assert work.is_completed()
        assert not work.is_success()

    def test_a_wait_may_have_a_limit_of_its_own(self, size: int) -> None:
        from datetime import timedelta

        x = torch.ones(3)
        y = torch.ones(3)
        if dist.get_rank() == 0:
            with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
                dist.all_reduce(x)
                dist.all_reduce(y)
            work = manager.works[0]
            with pytest.raises(RuntimeError, match=r"was not complete after waiting 0\.2 s; it goes on"):
                work.wait(timedelta(seconds=0.2))
            dist.send(torch.ones(1), 1)
            work.wait()
        elif dist.get_rank() == 1:
            dist.all_reduce(x)
            dist.recv(torch.empty(1), 0)
            dist.all_reduce(y)
        assert x.tolist() == y.tolist() == [size] * 3

    @pytest.mark.parametrize("async_op", [False, True])
    def test_a_barrier_may_have_a_limit_of_its_own(self, size: int, async_op: bool) -> None:
        from datetime import timedelta

        def meet() -> None:
            work = dist.barrier(async_op=async_op, timeout=timedelta(seconds=0.2))
            if async_op:
                work.wait()

        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"was not complete after waiting 0\.2 s; it goes on"):
                meet()
            dist.send(torch.ones(1), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(1), 0)
            dist.barrier()
        hasty = dist.new_group()
        hasty.set_timeout(timedelta(seconds=0.5))
        time.sleep(1.0 if dist.get_rank() == 0 else 0.0)
        work = dist.barrier(hasty, async_op=async_op, timeout=timedelta(seconds=60))
        if async_op:
            work.wait()

    def test_what_runs_when_a_group_is_destroyed_ends(self, size: int) -> None:
        group = dist.new_group()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            dist.destroy_process_group(group)
            with pytest.raises(RuntimeError, match="the process group was destroyed while this call ran"):
                work.wait()
        dist.barrier()

    def test_objects(self, size: int) -> None:
        result = [None] * size
        dist.all_gather_object(result, {"rank": dist.get_rank()})
        assert result == [{"rank": rank} for rank in range(size)]
        box: list[Any] = [None] if dist.get_rank() else ["hello"]
        dist.broadcast_object_list(box, 0)
        assert box == ["hello"]

    def test_groups_are_made_by_their_members_alone(self, size: int) -> None:
        rank = dist.get_rank()
        mine = dist.new_group([rank], use_local_synchronization=True)
        x = torch.ones(2)
        dist.all_reduce(x, group=mine)
        assert x.tolist() == [1, 1]
        dist.destroy_process_group(mine)
        mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
        dist.all_reduce(x, group=mesh["inner"].get_group())
        assert x.tolist() == [size, size]

    def test_a_group_is_split_into_others(self, size: int) -> None:
        from datetime import timedelta

        rank = dist.get_rank()
        x = torch.ones(2)
        parent = dist.new_group()
        child = parent.split_group([0, 1], timedelta(seconds=50), None, "pair", "two of them")
        assert (child.rank(), child.size(), child.group_name, child.group_desc) == (rank, 2, "pair", "two of them")
        assert child._comm.transport.label.endswith(" (two of them)")
        child.allreduce([x]).wait()
        assert x.tolist() == [2, 2]
        alone = parent.split_group([0])
        assert (alone is None) == (rank != 0)
        if alone is not None:
            assert alone.group_name == f"{parent.group_name}:split:[0]"
        for wrong in ([rank, rank], [rank, 0, 1]):
            with pytest.raises((RuntimeError, ValueError)):
                parent.split_group(wrong)
        dist.destroy_process_group(parent)

    def test_the_profiler_sees_calls(self, size: int) -> None:
        rank = dist.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 5))
        with torch.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3, 4))
            dist.all_reduce(torch.ones(2), async_op=True).wait()
            dist.all_reduce_coalesced([torch.ones(2), torch.ones(3, 3)])
            dist.all_gather([torch.empty(2, 1)] * size, torch.ones(2, 1))
            dist.reduce_scatter_tensor(torch.ones(3), torch.ones(size * 3))
            dist.broadcast(torch.ones(2, dtype=torch.bfloat16), 0)
            dist.barrier()
            if rank == 0:
                dist.send(torch.ones(1, 7), 1)
                dist.recv(torch.empty(6))
            else:
                dist.recv(torch.ones(1, 7), 0)
                dist.send(torch.ones(6), 0)
            model(torch.ones(2, 4)).sum().backward()
        events = [event for event in profile.events() if event.name.startswith("ddp:")]
        moved = [("send", [[1, 7]]), ("recvAnySource", [[6]])] if rank == 0 else [("recv", [[1, 7]]), ("send", [[6]])]
        assert [(event.name[4:], event.input_shapes) for event in events] == [
            ("all_reduce", [[3, 4]]),
            ("all_reduce", [[2]]),
            ("all_reduce", [[2], [3, 3]]),
            ("all_gather", [[2, 1]]),
            ("reduce_scatter", [[size * 3]]),
            ("broadcast", [[2]]),
            ("barrier", []),
            *moved,
            ("all_reduce", [[25]]),
        ]
        assert all(event.is_async for event in events)

    def test_an_event_of_the_profiler_ends_with_an_error(self, size: int) -> None:
        with torch.profiler.profile() as profile:
            with pytest.raises(RuntimeError) as raised:
                dist.group.WORLD.broadcast([torch.ones(2)], SimpleNamespace(rootRank=size, asyncOp=False))
            time.sleep(1)
        (event,) = (event for event in profile.events() if event.name == "ddp:broadcast")
        assert event.time_range.elapsed_us() < 5e5, raised

    def test_monitored_barrier(self, size: int) -> None:
        from datetime import timedelta

        group = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=60))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"rank 1 did not come to monitored_barrier in 0\.1 s"):
                group.monitored_barrier(timedelta(seconds=0.1))
        dist.barrier()

    def test_what_cannot_be_meant_is_refused(self, size: int) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed.tensor import distribute_tensor

        rank = dist.get_rank()
        shards = distribute_tensor(torch.ones(size), dist.init_device_mesh("cpu", (size,)))
        with FakeTensorMode():
            fake = torch.ones(3)
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        negative = torch.tensor([1 + 2j]).conj().imag
        refusals: list[tuple[str, Callable[[], object]]] = [
            ("twice", lambda: dist.init_process_group("ddp")),
            ("moves tensors of the CPU", lambda: dist.all_reduce(torch.empty(3, device="meta"))),
            (
                "can be moved between ranks, but not reduced",
                lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)),
            ),
            ("this DTensor has no memory; that of a DTensor is tensor.to_local", lambda: dist.all_reduce(shards)),
            ("this FakeTensor has no memory", lambda: dist.all_reduce(fake)),
            ("this Tensor has no memory", lambda: dist.broadcast(freed, 0)),
            ("the negative of its elements", lambda: dist.broadcast(negative, 0)),
            (
                "bitwise_and takes integers or bools, not float32",
                lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
            ),
            (
                r"out should be float32 \(4,\), is float32 \(3,\)",
                lambda: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2)),
            ),
            (
                "should be a contiguous tensor",
                lambda: dist.all_gather_into_tensor(torch.empty(4, 4)[:, :2], torch.empty(4)),
            ),
            (
                "outputs should be 2 tensors, one a rank, are 1",
                lambda: dist.all_gather([torch.empty(2)], torch.empty(2)),
            ),
            (
                r"lengths \[3, 2\] add up to 5, x has 4 rows",
                lambda: dist.all_to_all_single(torch.empty(4), torch.empty(4), [2, 2], [3, 2]),
            ),
            (
                r"lengths \[3, 3\] add up to 6, x has 4 rows",
                lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.empty(4)),
            ),
        ]
        for sentence, call in refusals:
            with pytest.raises((RuntimeError, ValueError), match=sentence):
                call()
        x = torch.zeros(3 if rank == 0 else 4)
        with pytest.raises(RuntimeError, match=r"(?s)float32 \(3,\)  on_ranks.py:\d+\n.*float32 \(4,\)"):
            dist.all_reduce(x)
        dist.barrier()


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient")


class TestRanksTrain:
    """PyTorch's own wrappers: the same numbers as one process on the whole batch."""

    def train(self, wrap: Callable[[Any], Any], size: int, optimizer: Any = None) -> Any:
        """Parameters after three steps on this rank's half of each batch."""
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        model = wrap(net)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        steps = make(model.parameters())
        rank = dist.get_rank() if wrap is not ALONE else slice(None)
        for number in range(3):
            x = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(number))[rank].reshape(-1, 8)
            steps.zero_grad()
            model(x).square().mean().backward()
            steps.step()
        return model

    def parameters(self, model: Any) -> list[Any]:
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().reshape(-1) for p in model.parameters()]

    def check(self, model: Any, size: int) -> None:
        alone = self.parameters(self.train(ALONE, size))
        torch.testing.assert_close(torch.cat(self.parameters(model)), torch.cat(alone))

    @pytest.mark.parametrize("hook", [None, "allreduce", "fp32_then", "powerSGD"])
    def test_distributed_data_parallel(self, size: int, hook: str | None) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        def wrap(net: Any) -> Any:
            model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0003)
            if hook == "allreduce":
                model.register_comm_hook(None, default_hooks.allreduce_hook)
            elif hook == "fp32_then":
                waits = lambda _, bucket: mean_and_wait(bucket, size)  # noqa: E731
                model.register_comm_hook(None, waits)
            elif hook == "powerSGD":
                state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return model

        model = self.train(wrap, size)
        if hook == "powerSGD":  # an approximation: the same on all ranks
            mine = torch.cat(self.parameters(model))
            theirs = mine.clone()
            dist.broadcast(theirs, 0)
            torch.testing.assert_close(mine, theirs)
        else:
            self.check(model, size)

    def test_the_thread_that_computes_a_backward_completes_its_calls(
        self, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: size)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200), process_group=dist.new_group())
        main = threading.main_thread().ident
        left_to_it: list[bool] = []
        advance = CallQueue._advance

        def recording(queue: CallQueue, call: Any, first: bool = False) -> bool:
            if threading.get_ident() == main:
                left_to_it.append(not queue._has_steps())
            return advance(queue, call, first)

        monkeypatch.setattr(CallQueue, "_advance", recording)
        model(torch.ones(2, 200)).sum().backward()
        assert left_to_it
        assert all(left_to_it)

    def test_calls_go_on_after_a_backward_that_raised(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: size)
        group = dist.new_group()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200), process_group=group)
        x = RaisesInBackward.apply(torch.ones(2, 200, requires_grad=True))
        with pytest.raises(RuntimeError, match="no gradient"):
            model(x).sum().backward()
        work = dist.all_reduce(torch.ones(1000, 1000), group=group, async_op=True)
        end = time.monotonic() + 20
        while not work.is_completed():  # no thread waits
            assert time.monotonic() < end
            time.sleep(0.01)

    def test_a_mismatch_in_backward_is_an_error_on_all_ranks(self, size: int) -> None:
        group = dist.new_group()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
        loss = model(torch.ones(2, 4)).sum()
        call = loss.backward if dist.get_rank() == 0 else functools.partial(dist.all_reduce, torch.ones(7), group=group)
        with pytest.raises(RuntimeError, match=r"(?s)different calls.*float32 \(20,\).*float32 \(7,\)"):
            call()

    def test_fully_sharded(self, size: int) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        for shape, names in (((size,), ("shard",)), ((1, size), ("replicate", "shard"))):
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
            self.check(self.train(functools.partial(fully_shard, mesh=mesh), size), size)
        model = self.train(lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")), size)
        with FullyShardedDataParallel.summon_full_params(model):
            self.check(model, size)

    def test_tensor_parallel(self, size: int) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        x = torch.randn(3, 8)
        expected = net(x).detach()
        mesh = dist.init_device_mesh("cpu", (size,))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.testing.assert_close(net(x).detach(), expected)

    def test_zero_redundancy_optimizer(self, size: int) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def zero(parameters: Any) -> Any:
            return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)

        self.check(self.train(torch.nn.parallel.DistributedDataParallel, size, zero), size)

    def test_a_distributed_checkpoint(self, size: int, tmp_path: Path) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.tensor import DTensor, Shard

        folder = [str(tmp_path)]
        dist.broadcast_object_list(folder, 0)
        mesh = dist.init_device_mesh("cpu", (size,))
        local = torch.full((2, 3), float(dist.get_rank()))
        saved = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
        checkpoint.save(saved, checkpoint_id=folder[0])
        result = {"w": DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])}
        checkpoint.load(result, checkpoint_id=folder[0])
        torch.testing.assert_close(result["w"].to_local(), local)

    def test_a_pipeline(self, size: int) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        rank = dist.get_rank()
        torch.manual_seed(rank)
        layer = torch.nn.Linear(4, 4)
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(5))
        result = schedule.step(x) if rank == 0 else schedule.step(target=torch.zeros(4, 4))
        if rank == size - 1:
            for each in range(size):
                torch.manual_seed(each)
                x = torch.nn.Linear(4, 4)(x)
            torch.testing.assert_close(result, x)
        assert layer.weight.grad.abs().sum() > 0


def ALONE(net: Any) -> Any:
    """No wrapper: one process on the whole batch."""
    return net


def mean_and_wait(bucket: Any, size: int) -> Any:
    """A hook whose callback waits for another call, through its future."""
    whole = bucket.buffer().div_(size)
    first = dist.all_reduce(whole, async_op=True).get_future()

    def then(future: Any) -> Any:
        extra = dist.all_reduce(torch.zeros(1), async_op=True).get_future()
        return future.value()[0] + extra.wait()[0]

    return first.then(then)
