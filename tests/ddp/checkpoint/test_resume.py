"""A training that is interrupted at any step, and gone on with, is the one that was not: every bit of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.optim import SGD, AdamW, lr_scheduler
from ddp.parallel import ZeroOptimizer, comm_hooks
from tests.ddp.checkpoint.training import Interrupted, Loader, assert_same, data, everything, interrupted, net
from tests.ddp.optim.wide_state import WideState

EPOCHS = 4  # of 3 steps


class Recipe:
    """What is trained, and how; the plain one is SGD with momentum."""

    def model(self, comm: collectives.Communicator) -> Any:
        return ddp.DataParallel(net(), comm, bucket_cap_mb=1)

    def optimizer(self, model: Any) -> Any:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def scheduler(self, optimizer: Any) -> Any:
        return None

    def scaler(self) -> Any:
        return None

    def loss(self, model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x), y)


class Decoupled(Recipe):
    def optimizer(self, model: Any) -> Any:
        return AdamW(model.parameters(), lr=0.01, amsgrad=True)

    def scheduler(self, optimizer: Any) -> Any:
        return lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
            [3],
        )


class Noisy(Recipe):
    """Dropout, and running statistics."""

    def model(self, comm: collectives.Communicator) -> Any:
        return ddp.DataParallel(net(dropout=0.5, norm=True), comm, bucket_cap_mb=1)

    def scheduler(self, optimizer: Any) -> Any:
        return lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 9], gamma=0.5)


class NoisyByRank(Noisy):
    def model(self, comm: collectives.Communicator) -> Any:
        return ddp.DataParallel(net(dropout=0.5, norm=True), comm, broadcast_buffers=False)


class Scaled(Recipe):
    def scaler(self) -> Any:
        return ddp.amp.GradScaler(init_scale=2.0**17, growth_interval=3)

    def loss(self, model: Any, x: Any, y: Any) -> Any:
        with ddp.amp.autocast("cpu", dtype=ddp.float16):
            return nn.functional.cross_entropy(model(x), y)


class Sharded(Recipe):
    def optimizer(self, model: Any) -> Any:
        return ZeroOptimizer(model, AdamW, lr=0.01)


class Wide(Recipe):
    """Parameters in bfloat16, and an optimizer of one's own with float32 and float64 state."""

    def model(self, comm: collectives.Communicator) -> Any:
        return ddp.DataParallel(net(dtype=ddp.bfloat16), comm, bucket_cap_mb=1)

    def optimizer(self, model: Any) -> Any:
        return WideState(model.parameters(), lr=0.01)

    def loss(self, model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x.to(ddp.bfloat16)).float(), y)


class WideSharded(Wide):
    def optimizer(self, model: Any) -> Any:
        return ZeroOptimizer(model, WideState, lr=0.01)


class Compressed(Recipe):
    def model(self, comm: collectives.Communicator) -> Any:
        hook = comm_hooks.PowerSGD(2, start_iter=2, min_compression_rate=0.5)
        return ddp.DataParallel(net(), comm, comm_hook=hook, bucket_cap_mb=1)


class Sparse(Recipe):
    def model(self, comm: collectives.Communicator) -> Any:
        return ddp.DataParallel(net(), comm, comm_hook=comm_hooks.TopK(0.2))


class Bare(Noisy):
    """Without DataParallel: ranks that have nothing to do with each other."""

    def model(self, comm: collectives.Communicator) -> Any:
        return net(dropout=0.5, norm=True)


def training(recipe: Recipe, folder: Path, **options: Any) -> Callable[..., Any]:
    """Trains, and returns the losses by step and everything at the end; see `interrupted`."""

    def train(comm: collectives.Communicator, end: int | None) -> Any:
        model = recipe.model(comm)
        optimizer = recipe.optimizer(model)
        scaler = recipe.scaler()
        losses = {}
        scheduler = recipe.scheduler(optimizer)
        ddp.manual_seed(100 + comm.rank)
        xs, ys = data()
        loader = Loader(comm)
        user = {"seen": np.zeros(0, np.int64), "rank": comm.rank}
        with Checkpointer(
            folder,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            user=user,
            comm=comm,
            **{"every": 1, **options},
        ) as ckpt:
            for ids in ckpt.resume(loader, epochs=EPOCHS):
                optimizer.zero_grad()
                loss = recipe.loss(model, xs[ids], ys[ids])
                losses[ckpt.step] = loss.item()
                if ckpt.step == end:
                    raise Interrupted(losses)
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                if scheduler is not None:
                    scheduler.step()
                user["seen"] = np.concatenate([user["seen"], ids])
        states = [] if scheduler is None else [scheduler.state_dict()]
        states += [] if scaler is None else [scaler.state_dict()]
        return losses, everything(model, [optimizer], *states, user)

    return train


RECIPES = [Recipe, Decoupled, Sharded, Sparse, Bare]
MORE_RECIPES = [NoisyByRank, Scaled, WideSharded, Compressed]


@pytest.mark.parametrize(
    ("recipe", "size", "background"),
    [
        *[(recipe, 3, False) for recipe in RECIPES],
        (Noisy, 1, False),
        (Sharded, 2, True),
        *[pytest.param(recipe, 3, False, marks=pytest.mark.long) for recipe in MORE_RECIPES],
    ],
)
def test_interrupted_anywhere_it_goes_on(recipe: type[Recipe], size: int, background: bool, folder: Path) -> None:
    [whole] = interrupted(training(recipe(), folder / "whole", every=None), [None], size)
    *parts, last = interrupted(training(recipe(), folder / "parts", async_save=background), [1, 4, 8, None], size)
    for rank, (losses, state) in enumerate(whole):
        got: dict[int, float] = {}
        for part in parts:
            got.update(part[rank])
        got.update(last[rank][0])
        assert got == losses
        assert_same(last[rank][1], state)


def test_buffers_that_wait_for_the_next_forward(folder: Path) -> None:
    """A rank with an empty batch makes no forward, and takes what the others sent it when it makes the next."""

    def train(comm: collectives.Communicator, resumed: bool) -> dict[str, Any]:
        model = ddp.DataParallel(net(norm=True), comm)
        optimizer = SGD(model.parameters(), lr=0.1)
        xs, ys = data()

        def step(first: int, count: int) -> None:
            ids = np.arange(first + 4 * comm.rank, first + 4 * comm.rank + count)
            loss = nn.functional.cross_entropy(model(xs[ids]), ys[ids], reduction="sum") if count else ddp.zeros(())
            model.backward(loss, weight=count)
            optimizer.step()
            optimizer.zero_grad()

        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm) as ckpt:
            if resumed:
                assert ckpt.load()
            else:
                step(0, 4)
                step(8, 0 if comm.rank == 1 else 4)
                ckpt.save()
            model.eval()
            seen = model(xs).detach().numpy().copy()
            model.train()
            step(16, 4)
        return {**everything(model, [optimizer]), "seen": seen}

    whole = collectives.run_threads(lambda comm: train(comm, False), size=2)
    resumed = collectives.run_threads(lambda comm: train(comm, True), size=2)
    for mine, theirs in zip(resumed, whole, strict=True):
        del mine["random"], theirs["random"]  # the initial ones
        assert_same(mine, theirs)
