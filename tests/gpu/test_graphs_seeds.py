"""Graphed steps on streams that run in any order that CUDA allows: the numbers of eager steps, for every seed.

A step is drawn by the seed: the model, the optimizer, what else the program does between the calls, and on how many
branches of streams a capture goes.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.nn import functional as F
from tests.gpu.installing import Gpu

pytestmark = pytest.mark.timeout(900)  # the full counts take minutes
OPTIMIZERS = {"SGD": {"momentum": 0.9}, "AdamW": {}, "RMSprop": {}, "Lion": {}}


@pytest.fixture(autouse=True)
def _collected_between() -> Iterator[None]:
    """Python 3.11 may collect while NumPy's errstate sets a context variable; finalizers that do a stream's work then
    read what was freed. No GPU does its work in the program's own thread."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def program(gpu: Any, seed: int, graphed: bool, joined: bool = True) -> list[Any]:
    """Trains a network whose two branches run on two streams; what it has at the end. joined: the branches meet"""
    dice = random.Random(seed)
    ddp.manual_seed(seed)
    width = dice.choice([4, 8])
    left, right = nn.Linear(6, width).to("cuda"), nn.Linear(6, width).to("cuda")
    head = nn.Sequential(nn.Dropout(dice.choice([0.0, 0.4])), nn.Linear(width, 3)).to("cuda")
    params = [p for part in (left, right, head) for p in part.parameters()]
    name = dice.choice(list(OPTIMIZERS))
    optimizer = getattr(ddp.optim, name)(params, lr=0.05, **OPTIMIZERS[name])
    side = ddp.cuda.Stream()
    clips, lends = dice.random() < 0.5, dice.random() < 0.3

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        here = ddp.cuda.current_stream()
        side.wait_stream(here)
        with ddp.cuda.stream(side):
            other = right(x)
        own = left(x)
        if joined:
            here.wait_stream(side)
        loss = F.mse_loss(head((own + other).relu()), y)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        return loss

    run: Callable[..., Any] = ddp.cuda.graphed_step(step, warmup=dice.choice([1, 2, 3])) if graphed else step
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(7):
        numbers = rng.standard_normal((5, 9)).astype(np.float32)
        losses.append(run(ddp.tensor(numbers[:, :6], device="cuda"), ddp.tensor(numbers[:, 6:], device="cuda")).clone())
        if lends:
            losses.append(params[0].grad * 1.0)
        for n in (5, 30, width * 6):  # what becomes free is somebody else's at once
            ddp.full((n,), 1e6, device="cuda")
    return [x.detach().cpu().numpy() for x in (*losses, *params)]


def agree(monkeypatch: pytest.MonkeyPatch, seed: int, joined: bool = True) -> bool:
    expected = program(Gpu(monkeypatch), seed, False)
    found = program(Gpu(monkeypatch, seed), seed, True, joined)
    return all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_replays_are_eager_steps_for_every_seed(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(3, 1000)):
        gc.collect()
        assert agree(monkeypatch, seed), f"seed {seed}"


def test_a_missing_edge_is_found(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator would notice: without the join, one seed or another gives other numbers, or CUDA's error."""

    def broken(seed: int) -> bool:
        try:
            return not agree(monkeypatch, seed, joined=False)
        except ddp.errors.CaptureError as error:
            return "unjoined" in str(error)

    assert any(broken(seed) for seed in range(8))
