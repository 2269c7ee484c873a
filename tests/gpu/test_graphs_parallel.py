"""Graphs of steps under DataParallel: ranks with a stand-in GPU each, whose NCCL meets at every launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.errors import CaptureError, ParallelError
from ddp.parallel import DataParallel, comm_hooks
from ddp.parallel.control import STOP
from ddp.parallel.zero.zero_optimizer import ZeroOptimizer
from tests.collectives.backends.device.fake_nccl import FakeLibrary
from tests.ddp.parallel.gpu.conftest import Rig, rig

__all__ = ["rig"]
STEPS = 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.aside = nn.Linear(2, 2)  # used by nobody

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)).relu())


def data_of(rank: int) -> list[tuple[Any, Any]]:
    dice = np.random.default_rng(rank)
    numbers = [dice.standard_normal((4, 9)).astype(np.float32) for _ in range(STEPS)]
    return [
        tuple(ddp.tensor(part, device=f"cuda:{rank}") for part in (x[:, :6].copy(), x[:, 6:].copy())) for x in numbers
    ]


def made(comm: Any, **options: Any) -> tuple[Any, Any]:
    with ddp.device(f"cuda:{comm.rank}"):
        ddp.manual_seed(4)
        net = Net().to(f"cuda:{comm.rank}")
    model = DataParallel(net, comm, bucket_cap_mb=0.0002, first_bucket_mb=0.0001, **options)
    optimizer = ddp.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def held(model: Any) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [x.detach().cpu().numpy() for x in tensors]


def run(comm: Any, graphed: bool, **options: Any) -> list[Any]:
    model, step = made(comm, **options)
    if graphed:
        step = ddp.cuda.graphed_step(step)
    losses = [step(*batch).item() for batch in data_of(comm.rank)]
    assert model.reducer.steps == STEPS
    if graphed:
        assert step.replays == STEPS - 3
    return [losses, *held(model)]


@pytest.mark.parametrize("seed", range(3))
def test_replays_are_eager_steps_to_the_bit(rig: Callable[..., Rig], seed: int) -> None:
    eager = rig(2, FakeLibrary(), seed).run(lambda comm, cupy: run(comm, False))
    graphed = rig(2, FakeLibrary(), seed).run(lambda comm, cupy: run(comm, True))
    for a, b in zip(eager, graphed, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_array_equal(x, y)
    for x, y in zip(graphed[0][1:7], graphed[1][1:7], strict=True):  # parameters; statistics are of a rank's own batch
        assert_array_equal(x, y)


@pytest.mark.parametrize("hook", [lambda: comm_hooks.bf16, lambda: comm_hooks.TopK(0.2)], ids=["bf16", "top k"])
def test_hooks_are_captured(rig: Callable[..., Rig], hook: Callable[[], Any]) -> None:
    eager, graphed = (
        rig(2, FakeLibrary()).run(lambda comm, cupy, g=g: run(comm, g, comm_hook=hook())) for g in (False, True)
    )
    for a, b in zip(eager, graphed, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_array_equal(x, y)


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ZeroOptimizer": (lambda model: ZeroOptimizer(model, ddp.optim.SGD, lr=0.1), {}),
    "backward": (lambda model: ddp.optim.SGD(model.parameters(), lr=0.1), {"check_finite": True}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_captured_yet_says_so(rig: Callable[..., Rig], named: str) -> None:
    optimizer_of, options = REFUSED[named]

    def rank(comm: Any, cupy: Any) -> str:
        model, _ = made(comm, **options)
        optimizer = optimizer_of(model)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()

        graphed = ddp.cuda.graphed_step(step, warmup=1)
        data = data_of(comm.rank)
        graphed(*data[0])
        with pytest.raises(CaptureError) as caught:
            graphed(*data[1])
        return str(caught.value)

    for said in rig(2, FakeLibrary()).run(rank):
        assert named in said
        assert "test_graphs_parallel.py" in said


def test_requests_arrive_a_step_later(rig: Callable[..., Rig]) -> None:
    def rank(comm: Any, cupy: Any) -> int:
        model, step = made(comm)
        graphed = ddp.cuda.graphed_step(step)
        heard = -1
        for number, batch in enumerate(data_of(comm.rank)):
            if number == 5 and comm.rank == 1:
                model.reducer.requests.requested[STOP] = True
            graphed(*batch)
            if heard < 0 and model.reducer.requests.received[STOP]:
                heard = number
        return heard

    assert rig(2, FakeLibrary()).run(rank) == [6, 6]


def test_a_launch_has_a_time_limit_and_one_entry_in_the_record(rig: Callable[..., Rig]) -> None:
    def rank(comm: Any, cupy: Any) -> list[str]:
        model, step = made(comm)
        graphed = ddp.cuda.graphed_step(step)
        data = data_of(comm.rank)
        for batch in data[:-1]:
            graphed(*batch)
        watchdog = model.comm._device_communicator.watchdog
        watched = []
        watch = watchdog.watch
        watchdog.watch = lambda *arguments: (watched.append(arguments[2]), watch(*arguments))
        graphed(*data[-1])
        assert all(call.recorder is not None and call.done for call in watched)
        return [str(call) for call in watched]

    for said in rig(2, FakeLibrary()).run(rank):
        (only,) = said
        assert only.startswith("graph #")
        assert "test_graphs_parallel.py" in only


def test_other_weights_than_at_the_capture_are_an_error_on_every_rank(rig: Callable[..., Rig]) -> None:
    def rank(comm: Any, cupy: Any) -> str:
        model, _ = made(comm)

        def step(x: Any, y: Any, n: int) -> Any:
            for p in model.parameters():
                p.grad = None
            model.backward(((model(x) - y) ** 2).sum(), weight=n)

        graphed = ddp.cuda.graphed_step(step, warmup=1)
        data = data_of(comm.rank)
        for n in (4, 5):
            for batch in data[:3]:
                graphed(*batch, n)
        assert graphed.captures == 2
        graphed(*data[4], 4 + comm.rank)  # each of the two graphs is right, and both together are not
        try:
            graphed(*data[5], 4)
        except ParallelError as error:
            return str(error)
        return ""

    said = rig(2, FakeLibrary()).run(rank)
    for each in said:
        assert "in step 7, which was replayed" in each
        assert "gave other weights than when it was captured" in each
