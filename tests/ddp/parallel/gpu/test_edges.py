"""What the host waits for in a step, which is nothing in the steady state, and in what order ranks call NCCL."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.parallel import DataParallel
from ddp.parallel.planner import WARM
from ddp.parallel.zero.zero_optimizer import ZeroOptimizer
from tests.collectives.backends.device.fake_nccl import FakeLibrary, FakeNccl
from tests.ddp.parallel.gpu.conftest import Rig, seeds
from tests.ddp.parallel.gpu.training import WAYS, Net, batch, loss_of
from tests.ddp.parallel.ranks import assert_same
from tests.gpu.driver import WAITS

NARROW = 0.0002  # MiB; a bucket for each of the large parameters
STEP = "step"


class Trainer:
    """A model on one rank's GPU, and its steps, which are marked in the log. hook: makes a communication hook"""

    def __init__(
        self,
        comm: Any,
        ranks: Rig,
        net: Net,
        hook: Callable[[], Any] = lambda: None,
        zero: bool = False,
        **options: Any,
    ) -> None:
        self.rank = comm.rank
        self.machine = ranks.machine
        self.layers = list(range(len(list(net.parameters())) // 2))
        self.device = f"cuda:{comm.rank}"
        self.model = DataParallel(
            net.to(self.device), comm, first_bucket_mb=NARROW, bucket_cap_mb=NARROW, comm_hook=hook(), **options
        )
        self.optimizer: ddp.optim.Optimizer = ddp.optim.SGD(self.model.parameters(), lr=0.05)
        if zero:
            self.optimizer = ZeroOptimizer(self.model, ddp.optim.SGD, lr=0.05)
        self.number = 0

    def step(self) -> None:
        self._mark()
        loss_of(self.model(batch(self.number, self.rank, self.device), self.layers)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._mark()
        self.number += 1

    def _mark(self) -> None:
        with self.machine.lock:
            self.machine.log.append((f"user {self.rank}.", STEP))


def waits_of_steps(ranks: Rig) -> list[list[str]]:
    """What the host waited for in each step of rank 0, from the machine's log."""
    parts: list[list[str]] = [[]]
    for stream, what in ranks.machine.log:
        if " 0." in stream and what == STEP:
            parts.append([])
        elif " 0." in stream and what.startswith(WAITS):
            parts[-1].append(what)
    return parts[1:-1:2]


OVER_WAYS = pytest.mark.parametrize(
    "way", ["", "low rank", "zero", *(pytest.param(way, marks=pytest.mark.long) for way in ("bf16", "top k"))]
)
TRANSPORTS = pytest.mark.parametrize("nccl", [None, FakeLibrary()], ids=["staged", "nccl"])


@TRANSPORTS
@OVER_WAYS
def test_the_host_waits_for_the_device_only_while_it_measures(rig: Callable[..., Rig], nccl: Any, way: str) -> None:
    ranks = rig(2, nccl)
    steps = WARM + 8

    def rank(comm: Any, cupy: Any) -> None:
        trainer = Trainer(comm, ranks, Net(2), check_every=5, **WAYS[way])
        for _ in range(steps):
            trainer.step()

    ranks.run(rank)
    actual = waits_of_steps(ranks)
    assert len(actual) == steps
    leaves = 4
    watched = [f"{WAITS} for an event"] * (leaves + 1)  # when each gradient came, and when all were there
    checked = [WAITS]  # the parameters' checksums, which were taken a step ago
    for step, waited in enumerate(actual):
        expected = watched if 1 <= step < WARM else []  # the first one's times do not count
        assert waited == (checked if step % 5 == 1 else []) + expected, step


def test_the_host_gets_through_steps_while_the_device_does_nothing(rig: Callable[..., Rig]) -> None:
    """Steps while the device does nothing, among them one after which the buckets move.

    The old ones go to nobody while the device still needs them, and the numbers are right when it has caught up.
    """
    ranks = rig(2, FakeLibrary())
    steps = WARM + 6
    late = 3

    def rank(comm: Any, cupy: Any) -> Any:
        net = Net(3)
        net.w1.requires_grad_(False)
        trainer = Trainer(comm, ranks, net, check_every=0)
        for _ in range(WARM):
            trainer.step()
        comm.barrier()
        ranks.machine.settle()
        comm.barrier()
        if comm.rank == 0:
            ranks.machine._step = lambda: False  # type: ignore[method-assign]
        comm.barrier()
        old = [weakref.ref(buffer._memptr.mem) for buffer in trainer.model.reducer.buckets.memory.buffers]
        for step in range(WARM, steps):
            if step == steps - late:
                net.w1.requires_grad_(True)
                assert "w1" not in {name for bucket in trainer.model.plan.buckets for name in bucket}
            trainer.step()
        assert "w1" in {name for bucket in trainer.model.plan.buckets for name in bucket}
        gc.collect()
        time.sleep(0.02)  # for the thread that lets go of buffers
        assert all(memory() is not None for memory in old), "given away"
        assert any(queue.pieces for queue in ranks.machine.queues.values())
        comm.barrier()
        if comm.rank == 0:
            del ranks.machine._step
        return [p.detach().cpu().numpy() for p in net.parameters()]

    actual = ranks.run(rank)
    assert_same(actual, [alone(steps, late)] * 2)


def alone(steps: int, late: int) -> list[Any]:
    """The run above on the CPU, with both ranks' batches, without any of this package."""
    net = Net(3)
    net.w1.requires_grad_(False)
    optimizer = ddp.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        if step == steps - late:
            net.w1.requires_grad_(True)
        (sum(loss_of(net(batch(step, rank, "cpu"), [0, 1, 2])) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in net.parameters()]


@OVER_WAYS
@seeds(3)
def test_ranks_hand_nccl_their_calls_in_one_order_over_all_communicators(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    """NCCL's kernels wait for other ranks on a device that all communicators share."""
    started: dict[str, list[Any]] = {}  # by the device's issuing thread
    start = FakeNccl._start

    def noted(self: FakeNccl, stream: int, operations: Any) -> None:
        started.setdefault(threading.current_thread().name, []).append((self.id, self.number))
        start(self, stream, operations)

    monkeypatch.setattr(FakeNccl, "_start", noted)
    ranks = rig(2, FakeLibrary(), seed)

    def rank(comm: Any, cupy: Any) -> None:
        trainer = Trainer(comm, ranks, Net(4), **WAYS[way])
        for _ in range(4):
            trainer.step()

    ranks.run(rank)
    one, other = started.values()
    assert one == other
    assert len(one) > 8
