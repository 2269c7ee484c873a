"""Gradients that ranks hold in parts are clipped and unscaled as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from collectives import Communicator
from ddp import optim
from ddp.amp import GradScaler
from ddp.nn import functional as F
from ddp.nn.utils import clip_grad_norm_
from ddp.parallel.zero import ZeroOptimizer
from tests.ddp.parallel.ranks import on_each_of
from tests.ddp.parallel.zero.training import Make, assert_equal, backward, batch, compare, values, wrapped


@pytest.mark.parametrize(
    ("norm_type", "max_norm"), [(2.0, 0.05), (1.0, 0.05), (3.0, 0.05), (float("inf"), 0.05), (2.0, 1e6)]
)
def test_clipping_by_the_global_norm(norm_type: float, max_norm: float) -> None:
    def rank(comm: Communicator, make: Make) -> Any:
        model = wrapped(comm)
        optimizer = make(model, optim.SGD, lr=0.1, momentum=0.9)
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step, sometimes=step == 1)
            if isinstance(optimizer, ZeroOptimizer):
                norm = optimizer.clip_grad_norm_(max_norm, norm_type)
            else:
                norm = clip_grad_norm_(model.parameters(), max_norm, norm_type)
            norms.append(norm)
            optimizer.step()
        return norms, values(model)

    compare(rank, 3, tolerance=1e-5)


@on_each_of(2)
def test_clipping_of_a_norm_that_is_not_finite(comm: Communicator) -> None:
    model = wrapped(comm)
    zero = ZeroOptimizer(model, optim.SGD, lr=0.1)
    assert zero.clip_grad_norm_(1.0).item() == 0  # no gradient is there
    with pytest.raises(ddp.errors.ArgumentError, match="norm_type=0: "):
        zero.clip_grad_norm_(1.0, 0)
    x, t = batch(0, comm.rank, comm.size)
    (F.cross_entropy(model(x), t) * (float("nan") if comm.rank == 1 else 1.0)).backward()
    before = values(model)
    with pytest.raises(ddp.errors.ArgumentError, match="total norm of order inf is nan"):
        zero.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True)
    assert np.isnan(zero.clip_grad_norm_(1.0, float("inf")).item())
    assert_equal(values(model), before)


@pytest.mark.parametrize("scale", [1024.0, 1000.0])  # any, not powers of two alone
def test_a_grad_scaler_leaves_out_the_same_steps_on_all_ranks(scale: float) -> None:
    def rank(comm: Communicator, make: Make) -> Any:
        model = wrapped(comm)
        optimizer = make(model, optim.Adam, lr=0.01)
        scaler = GradScaler(init_scale=scale, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            x, t = batch(step, comm.rank, comm.size)
            loss = scaler.scale(F.cross_entropy(model(x), t))
            if step == 3 and comm.rank == 0:  # in the part of one rank alone
                loss = loss + float("inf") * model.module.scalar
            loss.backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values(model)

    scales, _ = compare(rank, 3)
    assert scales == [scale * factor for factor in (1, 2, 2, 1, 1, 2)]
