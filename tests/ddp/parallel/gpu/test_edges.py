"""What a backward puts on which stream, word for word, and what the host waits for: in the steady state, nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from ddp.parallel import DataParallel, comm_hooks
from ddp.parallel.planner import WARM
from ddp.parallel.zero.zero_optimizer import ZeroOptimizer
from tests.collectives.backends.device.fake_nccl import FakeLibrary, FakeNccl
from tests.ddp.parallel.gpu.conftest import Rig
from tests.ddp.parallel.gpu.training import Net, batch, loss_of
from tests.gpu.driver import WAITS

NARROW = 0.0002  # MiB; a bucket for each of the large parameters
STEP, BEGINS, ENDS = "step", "backward begins", "backward ends"


class Trainer:
    """A model on one rank's GPU, and its steps. made: where backwards are marked in the log; frozen: a parameter"""

    def __init__(
        self, comm: Any, ranks: Rig, layers: int = 2, frozen: str = "", zero: bool = False, **options: Any
    ) -> None:
        self.rank = comm.rank
        self.machine = ranks.machine
        self.layers = layers
        self.device = f"cuda:{comm.rank}"
        self.net = Net(layers).to(self.device)
        if frozen:
            getattr(self.net, frozen).requires_grad_(False)
        self.model = DataParallel(self.net, comm, first_bucket_mb=NARROW, **{"bucket_cap_mb": NARROW, **options})
        self.optimizer: ddp.optim.Optimizer = ddp.optim.SGD(self.model.parameters(), lr=0.05)
        if zero:
            self.optimizer = ZeroOptimizer(self.model, ddp.optim.SGD, lr=0.05)
        self.number = 0

    def step(self) -> None:
        self._note(STEP)
        loss = loss_of(self.model(batch(self.number, self.rank, self.device), list(range(self.layers))))
        self._note(BEGINS)
        loss.backward()
        self._note(ENDS)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._note(STEP)
        self.number += 1

    def _note(self, what: str) -> None:
        with self.machine.lock:
            self.machine.log.append((f"user {self.rank}.", what))


def between(ranks: Rig, begins: str, ends: str) -> Iterator[list[tuple[str, str]]]:
    """What was noted of each backward or step of rank 0, on all its streams, from the machine's log."""
    inside: list[tuple[str, str]] | None = None
    for stream, what in ranks.machine.log:
        if " 0." not in stream:
            continue
        if inside is not None and what == ends:
            yield inside
            inside = None
        elif what == begins:
            inside = []
        elif inside is not None:
            inside.append((stream, what))


def waits(entries: list[tuple[str, str]]) -> list[str]:
    return [what for _, what in entries if what.startswith(WAITS)]


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "": dict,
    "bf16": lambda: {"comm_hook": comm_hooks.bf16},
    "low rank": lambda: {"comm_hook": comm_hooks.PowerSGD(1, 1, min_compression_rate=0)},
    "top k": lambda: {"comm_hook": comm_hooks.TopK(0.2)},
    "zero": lambda: {"zero": True},
}
TRANSPORTS = pytest.mark.parametrize("nccl", [None, FakeLibrary()], ids=["staged", "nccl"])


@TRANSPORTS
@pytest.mark.parametrize(
    "way", ["", "low rank", "zero", *(pytest.param(way, marks=pytest.mark.long) for way in ("bf16", "top k"))]
)
def test_the_host_waits_for_the_device_only_while_it_measures(rig: Callable[..., Rig], nccl: Any, way: str) -> None:
    ranks = rig(2, nccl)
    steps = WARM + 8

    def rank(comm: Any, cupy: Any) -> None:
        trainer = Trainer(comm, ranks, check_every=5, **WAYS[way]())
        for _ in range(steps):
            trainer.step()

    ranks.run(rank)
    actual = [waits(each) for each in between(ranks, STEP, STEP)]
    assert len(actual) == steps
    leaves = 4
    watched = [f"{WAITS} for an event"] * (leaves + 1)  # when each gradient came, and when all were there
    checked = [WAITS]  # the parameters' checksums, which were taken a step ago
    for step, waited in enumerate(actual):
        expected = watched if 1 <= step < WARM else []  # the first one's times do not count
        assert waited == (checked if step % 5 == 1 else []) + expected, step


def steps_ahead_of_the_device(ranks: Rig) -> None:
    """Steps while the device does nothing, among them one after which the buckets move.

    The old ones go to nobody while the device still needs them, and the numbers are right when it has caught up.
    """
    steps = WARM + 6
    late = 3

    def rank(comm: Any, cupy: Any) -> list[Any]:
        trainer = Trainer(comm, ranks, layers=3, frozen="w1", check_every=0)
        net = trainer.net
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
    for got, expected in zip(actual, collectives.run_threads(lambda comm: alone(comm, steps, late), 2), strict=True):
        for one, other in zip(got, expected, strict=True):
            assert_allclose(one, other, rtol=1e-12)


def test_the_host_gets_through_steps_while_the_device_does_nothing(rig: Callable[..., Rig]) -> None:
    steps_ahead_of_the_device(rig(2, FakeLibrary()))


def alone(comm: Any, steps: int, late: int) -> list[Any]:
    """The run above on the CPU, both ranks' batches on each rank, without any of this package."""
    net = Net(3)
    net.w1.requires_grad_(False)
    optimizer = ddp.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        if step == steps - late:
            net.w1.requires_grad_(True)
        losses = [loss_of(net(batch(step, rank, "cpu"), [0, 1, 2])) for rank in range(comm.size)]
        (sum(losses[1:], losses[0]) / comm.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in net.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 4))])
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
        trainer = Trainer(comm, ranks, layers=4, **WAYS[way]())
        for _ in range(4):
            trainer.step()

    ranks.run(rank)
    one, other = started.values()
    assert one == other
    assert len(one) > 8
