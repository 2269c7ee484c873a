"""HookExchange: one order of calls on every rank, no waits before the end, and errors that name the bucket."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, Work
from collectives.errors import CollectiveTimeout, MismatchError
from ddp.errors import DtypeError, ParallelError
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.grad_bucket import GradBucket
from ddp.parallel.comm_hooks.hook_exchange import HookExchange
from tests.ddp.parallel.comm_hooks.driving import Control, buckets_of, step
from tests.ddp.parallel.ranks import Arrays, assert_same, on_ranks

NAMES = [f"layer{index}" for index in range(6)]
PLAN = [[name] for name in NAMES]
USED = [True, False, True, True, True, True]


def gradients(value: float = 1.0) -> Arrays:
    return {name: np.full((2, index + 1), value) for index, name in enumerate(NAMES)}


def begun(hook: Any, comm: Communicator, plan: Any = PLAN, scale: float = 1.0) -> tuple[HookExchange, Buckets, Control]:
    """An exchange in the middle of a backward, with no bucket launched yet."""
    exchange = HookExchange(hook, comm, NAMES)
    buckets = buckets_of(gradients(), plan)
    control = Control(scale, USED)
    exchange.set_buckets(buckets)
    exchange.begin(control)
    return exchange, buckets, control


def in_place(bucket: GradBucket) -> Any:
    return bucket.comm.all_reduce(bucket.buffer, out=bucket.buffer, async_op=True)


def three_rounds(bucket: GradBucket) -> Iterator[Any]:
    """The mean, in three calls."""
    share = bucket.buffer * bucket.scale
    low = yield bucket.comm.all_reduce(share[::2].copy(), async_op=True)
    high = yield bucket.comm.all_reduce(share[1::2].copy(), async_op=True)
    bucket.buffer[::2] = low
    bucket.buffer[1::2] = high
    total = yield bucket.comm.all_reduce(bucket.buffer.sum(keepdims=True), async_op=True)
    assert total.shape == (1,)


class Late(Work[Any]):
    """A Work that is done some time after it is."""

    def __init__(self, work: Work[Any], seconds: float) -> None:
        self._work = work
        self._due = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() > self._due and self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        return self._work.wait(timeout)

    def times(self) -> None:
        return None


class Delaying:
    """A communicator whose works end at random times, others on each rank; it notes the calls."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._chance = random.Random(comm.rank)
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Any, **kwargs: Any) -> Any:
        self.calls.append(x.shape)
        return Late(self._comm.all_reduce(x, **kwargs), self._chance.choice([0, 0, 0.003]))


@pytest.mark.parametrize("size", [1, 3])
def test_calls_are_made_in_one_order_whatever_ends_first(size: int) -> None:
    def rank(comm: Communicator) -> None:
        delaying: Any = Delaying(comm)
        exchange = HookExchange(three_rounds, delaying, NAMES)
        buckets = buckets_of(gradients(), PLAN)
        exchange.set_buckets(buckets)
        for _ in range(5):
            became = step(exchange, buckets, gradients(comm.rank + 1), 0.5)
        assert_same(became, gradients(sum(range(1, size + 1)) / 2), 0)
        lengths = [len(buffer) for buffer in buckets.memory.buffers]
        rounds = [((-(-n // 2),), (n // 2,), (1,)) for n in lengths]
        ticks = range(len(rounds) + 2)  # at each one bucket begins, and those before it go on
        assert delaying.calls == 5 * [rounds[t - r][r] for t in ticks for r in range(3) if 0 <= t - r < len(rounds)]
        assert all(0 < times[0] <= times[1] for times in exchange.times() if times is not None)

    on_ranks(rank, size)


def test_nothing_waits_before_the_end_and_later_rounds_go_on_in_between() -> None:
    """The second rank comes late: until then the first one's calls all return, with only first rounds made."""
    first_is_through = threading.Event()

    def rank(comm: Communicator) -> None:
        noting: Any = Delaying(comm)
        exchange, buckets, _ = begun(three_rounds, noting)
        if comm.rank == 1:
            assert first_is_through.wait(30)
        for index, buffer in enumerate(buckets.memory.buffers):
            buffer[:] = 1
            exchange.launch(index)
            exchange.poll()
        if comm.rank == 0:
            assert len(noting.calls) == 2
            first_is_through.set()
            deadline = time.monotonic() + 30
            while len(noting.calls) < 3 * len(PLAN):
                exchange.poll()
                assert time.monotonic() < deadline
        exchange.finish()
        assert {buffer.max() for buffer in buckets.memory.buffers} == {2}

    on_ranks(rank)


def test_a_returned_work_lets_the_next_bucket_go_before_it_is_done() -> None:
    all_launched = threading.Event()

    def rank(comm: Communicator) -> None:
        noting: Any = Delaying(comm)
        exchange, _, _ = begun(in_place, noting)
        assert comm.rank == 0 or all_launched.wait(30)
        for index in range(len(PLAN)):
            exchange.launch(index)
        assert len(noting.calls) == len(PLAN)
        all_launched.set()
        exchange.finish()

    on_ranks(rank)


def test_no_hook_runs_before_the_control_message_is_there() -> None:
    seen: list[tuple[int, float]] = []

    def hook(bucket: GradBucket) -> None:
        seen.append((bucket.index, bucket.scale))

    def rank(comm: Communicator) -> None:
        exchange, _, control = begun(hook, comm, [NAMES[:2], NAMES[2:4], NAMES[4:]], scale=0.125)
        control.arrived = False
        exchange.launch(0)
        exchange.launch(1)
        exchange.poll()
        assert seen == []
        control.arrived = True
        exchange.poll()
        assert seen == [(0, 0.125), (1, 0.125)]
        exchange.launch(2)
        assert len(seen) == 3
        exchange.finish()

    on_ranks(rank, 1)


def test_a_hook_may_return_a_work_or_nothing_or_need_fewer_rounds() -> None:
    def at_once(bucket: GradBucket) -> None:
        bucket.comm.all_reduce(bucket.buffer, out=bucket.buffer)

    def nothing_yielded(bucket: GradBucket) -> Any:
        bucket.buffer *= 2
        return
        yield

    def sometimes(bucket: GradBucket) -> Any:
        yield in_place(bucket)
        if bucket.index % 2:
            yield bucket.comm.barrier(async_op=True)

    def rank(comm: Communicator) -> None:
        for hook in (in_place, at_once, nothing_yielded, sometimes):
            exchange = HookExchange(hook, comm, NAMES)
            buckets = buckets_of(gradients(), PLAN)
            exchange.set_buckets(buckets)
            for _ in range(2):
                for g in step(exchange, buckets, gradients(), 1.0).values():
                    assert (g == 2).all(), hook
            assert None not in exchange.times()

    on_ranks(rank)


def broken_hooks() -> list[Any]:
    def raises(bucket: GradBucket) -> None:
        raise ZeroDivisionError("of mine")

    def returns_an_array(bucket: GradBucket) -> Any:
        return bucket.comm.all_reduce(bucket.buffer)

    def forgets_out(bucket: GradBucket) -> Any:
        return bucket.comm.all_reduce(bucket.buffer, async_op=True)

    def yields_an_array(bucket: GradBucket) -> Any:
        yield bucket.comm.all_reduce(bucket.buffer)

    async def asynchronous(bucket: GradBucket) -> None:
        pass

    return [
        (raises, ParallelError, "ZeroDivisionError: of mine"),
        (returns_an_array, DtypeError, "it returned ndarray, should be a Work"),
        (forgets_out, ParallelError, "out=bucket.buffer"),
        (yields_an_array, DtypeError, "it yielded ndarray, should be a Work: call collectives with async_op=True"),
        (asynchronous, DtypeError, "it returned coroutine"),
    ]


@pytest.mark.parametrize(("hook", "error", "message"), broken_hooks(), ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_errors_name_hook_and_bucket(hook: Any, error: type[Exception], message: str) -> None:
    def rank(comm: Communicator) -> None:
        exchange, _, _ = begun(hook, comm, [NAMES])

        def run() -> None:
            exchange.launch(0)
            exchange.finish()

        where = rf"^rank \d: communication hook {hook.__name__} on bucket 0 of 1 \(layer0, layer1, ..., layer5\): "
        with pytest.raises(error, match=where + f".*{message}"):
            run()

    on_ranks(rank)
    gc.collect()  # a coroutine that was not awaited goes here, where its warning is expected


def test_errors_of_collectives_keep_their_type() -> None:
    def hook(bucket: GradBucket) -> Any:
        return bucket.comm.all_reduce(bucket.buffer[: 1 + bucket.comm.rank], async_op=True)

    def rank(comm: Communicator) -> None:
        exchange, _, _ = begun(hook, comm, [NAMES])

        def run() -> None:
            exchange.launch(0)  # may find it already
            exchange.finish()

        with pytest.raises(
            MismatchError, match=r"(?s)^communication hook hook on bucket 0 of 1 \(.*\): rank .*all_reduce"
        ):
            run()

    on_ranks(rank)


def test_a_rank_that_does_not_come_is_a_timeout_that_names_the_bucket() -> None:
    other_has_waited = threading.Event()

    def hook(bucket: GradBucket) -> Any:
        if bucket.comm.rank == bucket.index == 1:
            assert other_has_waited.wait(30)
            raise ZeroDivisionError
        yield bucket.comm.barrier(async_op=True)

    def rank(comm: Communicator) -> None:
        exchange, _, _ = begun(hook, comm)
        comm.barrier()  # a slow machine begins in peace
        comm.timeout = 1.0

        def run() -> None:
            for index in range(len(PLAN)):
                exchange.launch(index)
            exchange.finish()

        where = rf"communication hook hook on bucket 1 of 6 \(layer1\): {['rank 0: barrier .*Rank 1', ''][comm.rank]}"
        try:
            with pytest.raises(ParallelError if comm.rank else CollectiveTimeout, match=where):
                run()
        finally:
            if comm.rank == 0:
                other_has_waited.set()

    on_ranks(rank)
