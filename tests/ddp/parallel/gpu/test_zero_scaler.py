"""Sharded steps under a GradScaler on GPUs: all ranks leave out what one of them found, and no host learns of it."""

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
from tests.ddp.parallel.gpu.conftest import Rig
from tests.ddp.parallel.gpu.training import Net, assert_numbers_of_the_cpu, batch, loss_of

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the optimizers' kernels need g++ to run on the CPU")

FACTORS = (1.0, 1.0, math.inf, 1.0, 1.0, 1.0)


class Own(optim.SGD):
    """An optimizer that does not say that it looks at what was found."""

    _step_supports_amp_scaling = False


def train(comm: Any, device: str, kind: Any, clipped: bool, uneven: bool = False) -> dict[str, Any]:
    net = Net(4).to(device)
    model = DataParallel(net, comm, bucket_cap_mb=0.0005, first_bucket_mb=0.0002)
    zero = ZeroOptimizer(model, kind, lr=0.05)
    scaler = GradScaler(device, init_scale=8.0, growth_interval=2)
    scales = []

    def step(number: int) -> None:
        # Of one rank alone: its part of the gradients is nobody else's.
        factor = FACTORS[number] if comm.rank == 0 else 1.0
        loss = loss_of(model(batch(number, comm.rank, device), [0, 1, 2, 3])) * factor
        scaler.scale(loss).backward()
        if clipped:
            scaler.unscale_(zero)
            zero.clip_grad_norm_(0.01)
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        scales.append(scaler.get_scale())

    if uneven:
        with model.join(optimizers=[zero]):
            for number in range(len(FACTORS) - 3 * comm.rank):
                step(number)
    else:
        for number in range(len(FACTORS)):
            step(number)
    found: dict[str, Any] = {name: p.detach().cpu().numpy() for name, p in net.named_parameters()}
    if not uneven:
        found["scales"] = np.array(scales)
    for number, entry in zero.state_dict()["state"].items():
        found.update({f"{name} of {number}": value.cpu().numpy() for name, value in entry.items()})
    return found


@pytest.mark.parametrize("nccl", [None, FakeLibrary()], ids=["staged", "nccl"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("kind", [optim.Adam, Own])
def test_all_ranks_leave_out_the_same_steps(
    rig: Callable[..., Rig], nccl: Any, kind: Any, clipped: bool, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(1, 20)):
        run = lambda comm, device, _: train(comm, device, kind, clipped)  # noqa: E731
        assert_numbers_of_the_cpu(rig, nccl, 2, seed, run, rtol=1e-6)
