"""CUDA graphs on a GPU: what the stand-in promises, held against eager steps there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.nn import functional as F

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

STEPS = 10


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_pool_grows_within_a_capture(mode: str) -> None:
    x = ddp.ones(1 << 20, device="cuda")
    g = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(g, capture_error_mode=mode):
        parts = [x * i for i in range(20)]
    g.replay()
    assert [part[-1].item() for part in parts] == list(range(20))


def run(optimizer: str, graphed: bool, net: Callable[[], Any], scaled: bool) -> list[Any]:
    ddp.manual_seed(3)
    model = net().to("cuda")
    optim = getattr(ddp.optim, optimizer)(model.parameters(), lr=0.01)
    schedule = ddp.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    scaler = ddp.amp.GradScaler(init_scale=2.0**10, enabled=scaled)

    def step(x: Any, y: Any) -> Any:
        optim.zero_grad()
        with ddp.amp.autocast("cuda", enabled=scaled):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optim)
        scaler.update()
        return loss

    call = ddp.cuda.graphed_step(step) if graphed else step
    dice = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        x = ddp.tensor(dice.standard_normal((32, 1, 8, 8)).astype(np.float32)).pin_memory()
        y = ddp.tensor(dice.integers(0, 4, 32))
        losses.append(call(x, y).item() if graphed else call(x.to("cuda"), y.to("cuda")).item())
        schedule.step()
    if graphed:
        assert call.captures == 1
    return [losses, *[x.detach().cpu().numpy() for x in (*model.parameters(), *model.buffers())]]


def mlp() -> Any:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.2), nn.Linear(128, 4)
    )


def cnn() -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("net", [mlp, cnn])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_replays_are_eager_steps(optimizer: str, net: Callable[[], Any], scaled: bool) -> None:
    eager, graphed = (run(optimizer, each, net, scaled) for each in (False, True))
    for a, b in zip(eager, graphed, strict=True):
        # The same kernels on the same numbers; a library may choose another algorithm within a capture.
        np.testing.assert_allclose(a, b, rtol=2e-2 if scaled else 1e-4, atol=1e-3 if scaled else 1e-5)


def test_a_replay_allocates_nothing() -> None:
    model = mlp().to("cuda")
    optim = ddp.optim.AdamW(model.parameters())

    @ddp.cuda.graphed_step
    def step(x: Any) -> Any:
        optim.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        return loss

    x = ddp.randn(32, 64, device="cuda")
    for _ in range(5):
        step(x)
    before = ddp.cuda.memory_reserved()
    for _ in range(20):
        step(x)
    ddp.cuda.synchronize()
    assert ddp.cuda.memory_reserved() == before
