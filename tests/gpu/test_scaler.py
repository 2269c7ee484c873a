"""GradScaler on a GPU: the CPU's scale, step by step, and a host that never learns what was left out."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from ddp._engine.grad_buffer import FULL
from ddp.amp import GradScaler
from tests.gpu import on_both

SETTINGS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
FACTORS = (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0)


class Own(ddp.optim.Optimizer):
    """An optimizer of a user's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with ddp.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def run(device: str, kind: Any, clipped: bool) -> list[list[float]]:
    """After each step the scale, the parameters, and how many steps went well."""
    scaler = GradScaler(device, **SETTINGS)
    ps = [ddp.tensor(x, device=device, requires_grad=True) for x in ([1.0, 2.0], [3.0])]
    optimizer = kind(ps, lr=0.5)
    results = []
    for factor in FACTORS:
        optimizer.zero_grad()
        losses = (ps[0] * ddp.tensor([1.0, factor], device=device)).sum() + ps[1].sum()
        scaler.scale(losses).backward()
        if clipped:
            scaler.unscale_(optimizer)
            ddp.nn.utils.clip_grad_norm_(ps, 1.0)
        scaler.step(optimizer)
        scaler.update()
        numbers = [x for p in ps for x in p.tolist()]
        results.append([scaler.get_scale(), *numbers, scaler.state_dict()["_growth_tracker"]])
    return results


@on_both
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("kind", [ddp.optim.SGD, ddp.optim.Adam, ddp.optim.Lion, Own])
def test_the_scale_is_that_of_the_cpu(kind: Any, clipped: bool, gpu: Any) -> None:
    assert_allclose(run("cuda", kind, clipped), run("cpu", kind, clipped), rtol=1e-6)


def test_an_optimizer_of_ones_own_waits(gpu: Any) -> None:
    scaler = GradScaler(**SETTINGS)
    p = ddp.ones(2, device="cuda", requires_grad=True)
    optimizer = Own([p], lr=0.5)
    scaler.scale(p.sum()).backward()
    gpu.reset()
    scaler.step(optimizer)
    assert sum(gpu.synchronizations.values()) == 1
    scaler.update()
    assert p.tolist() == [0.5, 0.5]


def test_a_step_is_a_few_launches_and_waits_for_nothing(gpu: Any) -> None:
    scaler = GradScaler(**SETTINGS)
    params = [ddp.ones(4 + i % 3, device="cuda", requires_grad=True) for i in range(100)]
    optimizer = ddp.optim.AdamW(params)
    schedule = ddp.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loss = ddp.ones((), device="cuda")
    for step in range(5):
        if step == 2:
            gpu.reset()
        for p in params:
            if step == 0:
                p.grad = ddp.ones(p.shape[0], device="cuda")
            p.leaf.grad_buffer.state = FULL
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        ddp.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    kernels = ("unscale", "norm_parts", "clip", "count_steps", "update", "update_scale")
    assert {name: gpu.launches[name] for name in kernels} == dict.fromkeys(kernels, 3)
    assert not gpu.synchronizations, gpu.waits
    assert (gpu.mallocs, gpu.frees, gpu.copies_up) == (0, 0, 0)
