"""GradScaler against PyTorch's, step by step, with gradients that are not finite among them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.amp import GradScaler
from ddp.errors import ArgumentError, GraphError, StateDictError

SETTINGS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}


def run(t: Any, scaler: Any) -> list[Any]:
    p = t.tensor([1.0, 2.0], requires_grad=True)
    optimizer = t.optim.SGD([p], lr=0.5)
    seen = []
    for factor in (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((p * t.tensor([1.0, factor])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), p.tolist()))
    return seen


def test_agrees_with_pytorch(torch: Any) -> None:
    assert run(ddp, GradScaler("cpu", **SETTINGS)) == run(torch, torch.amp.GradScaler("cpu", **SETTINGS))


def prepared() -> tuple[GradScaler, ddp.Tensor, Any]:
    scaler = GradScaler("cpu", **SETTINGS)
    p = ddp.ones(2, requires_grad=True)
    optimizer = ddp.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    return scaler, p, optimizer


def test_unscaled_gradients_can_be_clipped() -> None:
    scaler, p, optimizer = prepared()
    assert p.grad is not None
    assert p.grad.tolist() == [8.0, 8.0]
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [1.0, 1.0]
    p.grad.mul_(0.5)
    scaler.step(optimizer)
    assert p.tolist() == [0.5, 0.5]
    with pytest.raises(GraphError):
        scaler.unscale_(optimizer)
    with pytest.raises(GraphError):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(GraphError):
        scaler.update()
    with pytest.raises(ArgumentError):
        scaler.step(optimizer, closure=lambda: None)


def test_state() -> None:
    scaler, _, optimizer = prepared()
    scaler.step(optimizer)
    scaler.update()
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 8.0
    assert (other.get_growth_factor(), other.get_backoff_factor(), other.get_growth_interval()) == (4.0, 0.25, 2)
    assert other.scale(ddp.tensor(60000.0, dtype=ddp.float16)).item() == 480000.0  # beyond its range
    with pytest.raises(ArgumentError):
        other.load_state_dict({})
    for wrong in ({"growth_factor": 3.0}, {**scaler.state_dict(), "scale": 4.0, "_growth_tracker": "x"}):
        with pytest.raises(StateDictError, match=r"expected what GradScaler.state_dict\(\) gave, got {"):
            other.load_state_dict(wrong)
        assert other.state_dict() == scaler.state_dict()
    for wrong in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"device": "gpu"}, {"device": 1024.0}):
        with pytest.raises(ArgumentError):
            GradScaler(**wrong)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_goes_on_by_itself(duplicate: Callable[[GradScaler], GradScaler]) -> None:
    scaler = GradScaler(init_scale=8.0)
    other = duplicate(scaler)
    other.update(32.0)
    assert other.get_scale() == other.scale(ddp.ones(())).item() == 32
    assert scaler.get_scale() == scaler.scale(ddp.ones(())).item() == 8


def test_disabled_it_passes_everything_through() -> None:
    scaler = GradScaler(enabled=False)
    p = ddp.ones(2, requires_grad=True)
    optimizer = ddp.optim.SGD([p], lr=1.0)
    loss = p.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [0.0, 0.0]
    assert scaler.state_dict() == {}
    assert (scaler.get_scale(), scaler.is_enabled()) == (1.0, False)
    one, two = GradScaler("cpu", init_scale=2.0).scale([loss, (loss,)])
    assert (one.item(), two[0].item()) == (4.0, 4.0)
