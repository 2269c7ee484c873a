"""A sharded optimizer's numbers are the unsharded one's, bit for bit: ranks of threads add in one order."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from collectives import Communicator
from ddp import optim
from ddp.nn import functional as F
from ddp.optim import lr_scheduler
from ddp.parallel import DataParallel
from tests.collectives.backends.shm.ranks import run_sharing
from tests.ddp.parallel.zero.training import (
    OPTIMIZERS,
    Make,
    Tensors,
    backward,
    batch,
    compare,
    replan,
    train,
    values,
    wrapped,
)

# Ranges are cut alike for every kind: other numbers of ranks are tried with one.
SIZED = [*((*each, 3) for each in OPTIMIZERS), (*OPTIMIZERS[2], 1), (*OPTIMIZERS[2], 2)]
IDS = [f"{kind.__name__}-{len(settings)}-{size}" for kind, settings, size in SIZED]


@pytest.mark.parametrize(("kind", "settings", "size"), SIZED, ids=IDS)
def test_every_optimizer_and_its_state_over_plans_that_change(kind: Any, settings: dict[str, Any], size: int) -> None:
    def rank(comm: Communicator, make: Make) -> Any:
        model = wrapped(comm, seed=comm.rank)
        optimizer = make(model, kind, **settings)

        def between(step: int) -> None:
            if step in (3, 5):  # state and gradients are there, and move to other ranks
                replan(model, step)

        weights = train(model, optimizer, range(6), between)
        state = optimizer.state_dict()
        if kind is optim.Adagrad:  # it begins at once for all; without a bucket that waits for the first gradient
            state["state"].pop(list(weights).index("frozen"), None)
        return weights, state

    compare(rank, size)


def test_ranks_that_read_gradients_and_parameters_in_shared_memory() -> None:
    def rank(comm: Communicator, make: Make) -> Tensors:
        model = wrapped(comm, seed=comm.rank)
        optimizer = make(model, optim.AdamW, lr=0.01)
        train(model, optimizer, range(3))
        replan(model, 3)
        return train(model, optimizer, range(3, 5))

    compare(rank, run=lambda fn, size: run_sharing(fn, [0] * size))


def test_groups_with_settings_and_names_of_their_own_under_a_schedule() -> None:
    def rank(comm: Communicator, make: Make) -> Any:
        model = wrapped(comm)
        named = list(model.module.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named if n.endswith("bias")], "lr": 0.05, "weight_decay": 0.0},
            {"params": [(n, p) for n, p in named if not n.endswith("bias")], "lr": ddp.tensor(0.02)},
        ]
        optimizer = make(model, optim.AdamW, params=groups, weight_decay=0.1)
        schedule = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        for step in range(6):
            train(model, optimizer, [step])
            schedule.step()
        return values(model), optimizer.state_dict()["param_groups"]

    compare(rank)


def test_a_parameter_unfrozen_later_and_one_frozen_meanwhile() -> None:
    def rank(comm: Communicator, make: Make) -> Tensors:
        model = wrapped(comm)
        optimizer = make(model, optim.Adam, lr=0.01)
        train(model, optimizer, range(3))
        model.module.frozen.requires_grad_()
        model.module.first.weight.requires_grad_(False)
        train(model, optimizer, range(3, 6))
        model.module.first.weight.requires_grad_()
        return train(model, optimizer, range(6, 9))

    assert (compare(rank, 3)["frozen"] != 1).any()


def test_a_parameter_without_a_bucket_keeps_its_state() -> None:
    """Its state is loaded while it is frozen, so no bucket holds it; when it is used, its momenta go on."""

    def rank(comm: Communicator, make: Make) -> Tensors:
        model = wrapped(comm)
        model.module.sometimes.requires_grad_(False)
        model = DataParallel(model, comm)
        optimizer = make(model, optim.Adam, lr=0.01)
        number = [name for name, _ in model.module.named_parameters()].index("sometimes")
        momenta = {name: ddp.full((37,), 0.25) for name in ("exp_avg", "exp_avg_sq")}
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": {number: {"step": ddp.tensor(2.0), **momenta}}})
        train(model, optimizer, range(2))
        assert optimizer.state_dict()["state"][number]["step"].item() == 2
        model.module.sometimes.requires_grad_(True)
        return train(model, optimizer, range(2, 5))

    compare(rank, 3)


def test_accumulation_inside_no_sync_and_over_repeated_backwards() -> None:
    def rank(comm: Communicator, make: Make) -> Tensors:
        model = wrapped(comm)
        optimizer = make(model, optim.SGD, lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step > 0)
            with model.no_sync():
                backward(model, 10 + step, sometimes=comm.rank == 1)
            backward(model, 20 + step)
            optimizer.step()
            backward(model, 30 + step)  # adds to the gradients that are there
            optimizer.step()
            optimizer.step()  # the same gradients once more
        return values(model)

    compare(rank, tolerance=2e-5)  # sums of sums, in another order


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_optimizer_and_model_and_parameters_in_other_memory(set_to_none: bool) -> None:
    def rank(comm: Communicator, make: Make) -> Tensors:
        model = wrapped(comm)
        optimizer = make(model, optim.Adam, lr=0.01)
        for step in range(4):
            (optimizer if step % 2 else model).zero_grad(set_to_none=set_to_none)
            backward(model, step, sometimes=step == 0)
            if step == 2:
                model.module.first.weight.data = model.module.first.weight.detach() * 0.5
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()  # with gradients that are zero, or none
        return values(model)

    compare(rank)


class Naive(optim.Optimizer):
    """As many write their own: it makes new arrays, and remembers a whole tensor, a count and a number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @ddp.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(mean=ddp.zeros_like(p), count=0, rate=ddp.tensor(1.0))
                state["count"] += 1
                state["rate"] = state["rate"] * 0.9
                state["mean"] = state["mean"] * 0.5 + p.grad * 0.5
                p.data = p.data - group["lr"] * state["rate"].to(p.dtype) * state["mean"] / state["count"]


def test_an_optimizer_of_one_s_own() -> None:
    def rank(comm: Communicator, make: Make) -> Any:
        model = wrapped(comm)
        optimizer = make(model, Naive)
        for step in range(4):
            optimizer.zero_grad()
            x, t = batch(step, 0, 1)  # every rank the whole batch: the mean is that of one
            F.cross_entropy(model(x), t).backward()
            if step == 2:
                replan(model, 3)
            optimizer.step()
        return values(model), optimizer.state_dict()["state"]

    compare(rank, tolerance=1e-5)
