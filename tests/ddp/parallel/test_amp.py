"""Mixed precision and recomputation under DataParallel: as one process, and ranks skip the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from collectives import Communicator
from ddp import nn
from ddp.amp import GradScaler, autocast
from ddp.nn.utils import clip_grad_norm_
from ddp.parallel import DataParallel
from tests.ddp.parallel.ranks import on_ranks, parameters


def make_net() -> nn.Module:
    ddp.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(rank: int, step: int) -> ddp.Tensor:
    return ddp.from_numpy(np.random.default_rng([rank, step]).normal(size=(4, 4)).astype(np.float32))


def test_scaled_steps_are_those_of_one_process_and_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    overflow = 2

    def train(model: nn.Module, net: nn.Module, ranks: list[int]) -> Any:
        optimizer = ddp.optim.SGD(net.parameters(), lr=0.1)
        scaler = GradScaler(init_scale=1024.0)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            for rank in ranks:
                with autocast("cpu", dtype=ddp.bfloat16):
                    loss = model(rows(rank, step)).float().square().mean()
                if step == overflow and rank == 1:
                    loss = loss * float("inf")
                scaler.scale(loss / len(ranks)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 0.5)
            before = parameters(net)
            scaler.step(optimizer)
            scaler.update()
            if step == overflow:
                for name, value in parameters(net).items():
                    assert_array_equal(value, before[name])
            scales.append(scaler.get_scale())
        return parameters(net), scales

    def rank(comm: Communicator) -> Any:
        model = DataParallel(make_net(), comm, check_every=1)
        return train(model, model.module, [comm.rank])

    alone = make_net()
    expected, scales = train(alone, alone, [0, 1])
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    everyones = on_ranks(rank)
    for got, theirs in everyones:
        assert theirs == scales
        for name, value in expected.items():
            assert_allclose(got[name], value, rtol=0, atol=1e-4, err_msg=name)
            assert_array_equal(got[name], everyones[0][0][name])
