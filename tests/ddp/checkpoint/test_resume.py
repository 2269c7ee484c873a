"""A training that is interrupted at any step, and gone on with, is the one that was not: every bit of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.optim import SGD, AdamW, lr_scheduler
from ddp.parallel import ZeroOptimizer, comm_hooks
from tests.ddp.checkpoint.training import Interrupted, Loader, assert_same, data, everything, interrupted, net
from tests.ddp.optim.wide_state import WideState

EPOCHS = 4  # of 3 steps


def parallel(comm: Communicator, **options: Any) -> Any:
    return ddp.DataParallel(net(), comm, **{"bucket_cap_mb": 1, **options})


def noisy() -> Any:
    return net(dropout=0.5, norm=True)


def wide_loss(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model(x.to(ddp.bfloat16)).float(), y)


def scaled_loss(model: Any, x: Any, y: Any) -> Any:
    with ddp.amp.autocast("cpu", dtype=ddp.float16):
        return nn.functional.cross_entropy(model(x), y)


def warm_up(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how; the plain one is SGD with momentum."""

    model: Any = parallel
    optimizer: Any = lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = lambda optimizer: None
    scaler: Any = lambda: None
    loss: Any = lambda model, x, y: nn.functional.cross_entropy(model(x), y)


STEPS = Recipe(scheduler=lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 9], gamma=0.5))
# Parameters in bfloat16, and an optimizer of one's own with float32 and float64 state.
WIDE = Recipe(model=lambda comm: ddp.DataParallel(net(dtype=ddp.bfloat16), comm, bucket_cap_mb=1), loss=wide_loss)
RECIPES = {
    "plain": Recipe(),
    "decoupled": Recipe(
        optimizer=lambda model: AdamW(model.parameters(), lr=0.01, amsgrad=True),
        scheduler=warm_up,
    ),
    # Dropout, and running statistics.
    "noisy": dataclasses.replace(STEPS, model=lambda comm: ddp.DataParallel(noisy(), comm, bucket_cap_mb=1)),
    "noisy by rank": dataclasses.replace(
        STEPS, model=lambda comm: ddp.DataParallel(noisy(), comm, broadcast_buffers=False)
    ),
    # Without DataParallel: ranks that have nothing to do with each other.
    "bare": dataclasses.replace(STEPS, model=lambda comm: noisy()),
    "scaled": Recipe(
        scaler=lambda: ddp.amp.GradScaler(init_scale=2.0**17, growth_interval=3),
        loss=scaled_loss,
    ),
    "sharded": Recipe(optimizer=lambda model: ZeroOptimizer(model, AdamW, lr=0.01)),
    "wide, sharded": dataclasses.replace(WIDE, optimizer=lambda model: ZeroOptimizer(model, WideState, lr=0.01)),
    "compressed": Recipe(
        model=lambda comm: parallel(comm, comm_hook=comm_hooks.PowerSGD(2, start_iter=2, min_compression_rate=0.5))
    ),
    "sparse": Recipe(model=lambda comm: parallel(comm, comm_hook=comm_hooks.TopK(0.2))),
}


def training(recipe: Recipe, folder: Path, **options: Any) -> Any:
    """Trains, and returns the losses by step and everything at the end; see `interrupted`."""

    def train(comm: Communicator, end: int | None) -> Any:
        model = recipe.model(comm)
        optimizer = recipe.optimizer(model)
        scaler = recipe.scaler()
        scheduler = recipe.scheduler(optimizer)
        ddp.manual_seed(100 + comm.rank)
        xs, ys = data()
        losses = {}
        user = {"seen": np.zeros(0, np.int64), "rank": comm.rank}
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "user": user}
        with Checkpointer(folder, comm=comm, **parts, **{"every": 1, **options}) as ckpt:
            for ids in ckpt.resume(Loader(comm), epochs=EPOCHS):
                optimizer.zero_grad()
                loss = recipe.loss(model, xs[ids], ys[ids])
                losses[ckpt.step] = loss.item()
                if ckpt.step == end:
                    raise Interrupted(losses)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                if scheduler is not None:
                    scheduler.step()
                user["seen"] = np.concatenate([user["seen"], ids])
        states = [part.state_dict() for part in (scheduler, scaler) if part is not None]
        return losses, everything(model, [optimizer], *states, user)

    return train


@pytest.mark.parametrize(
    ("name", "size", "background"),
    [
        ("decoupled", 2, False),
        ("sharded", 3, True),
        ("sparse", 2, False),
        ("bare", 2, False),
        ("noisy", 1, False),
        *[
            pytest.param(name, 3, False, marks=pytest.mark.long)
            for name in ("plain", "sharded", "noisy by rank", "scaled", "wide, sharded", "compressed")
        ],
    ],
)
def test_interrupted_anywhere_it_goes_on(name: str, size: int, background: bool, folder: Path) -> None:
    recipe = RECIPES[name]
    [whole] = interrupted(training(recipe, folder / "whole", every=None), [None], size)
    *parts, last = interrupted(training(recipe, folder / "parts", async_save=background), [1, 4, 8, None], size)
    for rank, (losses, state) in enumerate(whole):
        got = {}
        for part in parts:
            got.update(part[rank])
        got.update(last[rank][0])
        assert got == losses
        assert_same(last[rank][1], state)


def test_buffers_that_wait_for_the_next_forward(folder: Path) -> None:
    """A rank with an empty batch makes no forward, and takes what the others sent it when it makes the next."""

    def train(comm: Communicator, resumed: bool) -> Any:
        model = ddp.DataParallel(net(norm=True), comm)
        optimizer = SGD(model.parameters(), lr=0.1)
        xs, ys = data()

        def step(first: int, count: int = 4) -> None:
            ids = np.arange(count) + first + 4 * comm.rank
            loss = nn.functional.cross_entropy(model(xs[ids]), ys[ids], reduction="sum") if count else ddp.zeros(())
            model.backward(loss, weight=count)
            optimizer.step()
            optimizer.zero_grad()

        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm) as ckpt:
            if resumed:
                assert ckpt.load()
            else:
                step(0)
                step(8, 0 if comm.rank == 1 else 4)
                ckpt.save()
            model.eval()
            seen = model(xs).detach().numpy().copy()
            model.train()
            step(16)
        return {**everything(model, [optimizer]), "seen": seen, "random": None}

    whole = collectives.run_threads(lambda comm: train(comm, False), size=2)
    resumed = collectives.run_threads(lambda comm: train(comm, True), size=2)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert_same(mine, theirs)
