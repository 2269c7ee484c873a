"""Sharded steps on GPUs whose streams run in random order: clipping, a GradScaler, state that moves and is saved.

All ranks leave out the step in which one of them found an infinity, and no host learns of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ddp import optim
from ddp.amp import GradScaler
from ddp.parallel import DataParallel
from ddp.parallel.zero import ZeroOptimizer
from tests.collectives.backends.device.fake_nccl import FakeLibrary
from tests.ddp.cuda import emulation
from tests.ddp.parallel.gpu.conftest import Rig, seeds
from tests.ddp.parallel.gpu.training import Between, Net, assert_numbers_of_the_cpu, batch, loss_of
from tests.ddp.parallel.zero.training import replan


class Own(optim.SGD):
    """An optimizer that does not say that it looks at what was found."""

    _step_supports_amp_scaling = False


MOMENTUM = {"momentum": 0.9}
STEPS, OVERFLOW = 8, 2


def train(
    comm: Any, device: str, seed: int, kind: Any, settings: dict[str, Any], between: Between = lambda: None
) -> dict[str, Any]:
    """Some steps; returns parameters, norms, scales and the whole state."""
    net = Net(4).to(device)
    model = DataParallel(net, comm, bucket_cap_mb=0.0005, first_bucket_mb=0.0002, check_every=3)
    zero = ZeroOptimizer(model, kind, lr=0.05, **settings)
    scaler = GradScaler(device, init_scale=8.0, growth_interval=2)
    result: dict[str, Any] = {}
    for step in range(STEPS):
        # Of one rank alone: its part of the gradients is nobody else's.
        factor = math.inf if step == OVERFLOW and comm.rank == 0 else 1.0
        loss = loss_of(model(batch(step, comm.rank, device), [0, 1, 2, 3] if step % 2 else [0, 2])) * factor
        scaler.scale(loss).backward()
        between()
        if step in (OVERFLOW, 4):
            replan(model, seed + step)
            between()
        if step % 2:
            scaler.unscale_(zero)
            result[f"norm at {step}"] = zero.clip_grad_norm_(0.01, [2.0, float("inf"), 1.0, 2.0][step // 2])
        between()
        scaler.step(zero)
        scaler.update()
        zero.zero_grad(set_to_none=step != 3)
        between()
        if step == 3:
            zero.load_state_dict(zero.state_dict())
        if step in (OVERFLOW, STEPS - 1):
            result[f"scale at {step}"] = scaler.get_scale()
    result.update(net.named_parameters())
    for number, entry in zero.state_dict()["state"].items():
        for name, value in entry.items():
            assert str(value.device) == ("cpu" if name == "step" else device)
            result[f"{name} of {number}"] = value
    return {
        name: np.array(value) if isinstance(value, float) else value.detach().cpu().numpy()
        for name, value in result.items()
    }


@pytest.mark.skipif(emulation.COMPILER is None, reason="the optimizers' kernels need g++ to run on the CPU")
@pytest.mark.parametrize(
    ("kind", "settings", "nccl"),
    [
        pytest.param(optim.SGD, MOMENTUM, None, id="SGD-staged"),
        pytest.param(optim.SGD, MOMENTUM, FakeLibrary(), id="SGD-nccl", marks=pytest.mark.long),
        pytest.param(optim.Adam, {}, FakeLibrary(), id="Adam-nccl"),
        pytest.param(Own, {}, FakeLibrary(), id="Own-nccl"),
    ],
)
@seeds(10)
def test_every_order_of_streams_gives_the_numbers_of_the_cpu(
    rig: Callable[..., Rig], nccl: Any, kind: Any, settings: dict[str, Any], seed: int
) -> None:
    size = 2 + (seed if nccl is None else seed + 1) % 2

    def run(comm: Any, device: str, between: Between) -> dict[str, Any]:
        return train(comm, device, seed, kind, settings, between)

    assert_numbers_of_the_cpu(rig, nccl, size, seed, run, rtol=1e-6)
