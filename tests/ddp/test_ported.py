"""Training loops as PyTorch's users write them: one text, run on both, with the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ddp

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

Steps = Iterator[Any]


def started(t: Any, make: Callable[[], Any]) -> Any:
    """A module of float64 weights that depend on their places alone."""
    module = make().double()
    for i, p in enumerate(module.parameters()):
        numbers = np.random.default_rng(i).standard_normal(tuple(p.shape)) / 2
        p.data.copy_(t.from_numpy(np.asarray(numbers)))
    return module


def drawn(t: Any, *shape: int, seed: int = 0) -> Any:
    return t.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def optimizer_of_ones_own(t: Any) -> Steps:
    class Adam(t.optim.Optimizer):  # type: ignore[misc]  # the class of either library
        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    grad, state = p.grad.data, self.state[p]
                    if len(state) == 0:
                        state["step"] = 0
                        state["exp_avg"], state["exp_avg_sq"] = t.zeros_like(p.data), t.zeros_like(p.data)
                    b1, b2 = group["betas"]
                    state["step"] += 1
                    state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                    state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                    size = group["lr"] * math.sqrt(1 - b2 ** state["step"]) / (1 - b1 ** state["step"])
                    p.data.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)

    net = started(t, lambda: t.nn.Sequential(t.nn.Linear(4, 5), t.nn.SELU(), t.nn.Linear(5, 3)))
    optimizer, x, y = Adam(net.parameters()), drawn(t, 6, 4), t.LongTensor([0, 1, 2, 0, 1, 2])
    for _ in range(5):
        optimizer.zero_grad()
        loss = t.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def averages_of_weights(t: Any) -> Steps:
    net = started(t, lambda: t.nn.Sequential(t.nn.Conv2d(2, 4, 3), t.nn.BatchNorm2d(4), t.nn.ReLU(inplace=True)))
    head = started(t, lambda: t.nn.Linear(4, 2))
    parameters = [{"params": net.parameters()}, {"params": head.parameters(), "lr": 0.2, "weight_decay": 0.0}]
    optimizer = t.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)
    schedule = t.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    shadow = {name: p.data.clone() for name, p in net.named_parameters()}
    for i in range(6):
        x = drawn(t, 3, 2, 5, 5, seed=i)
        loss = (head(net(x).mean([2, 3])) - 1).pow(2).mean() / 2
        loss.backward()
        if i % 2:
            yield t.nn.utils.clip_grad_norm_([*net.parameters(), *head.parameters()], 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            for name, p in net.named_parameters():
                shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
        yield loss
    kept = {name: p.data for name, p in net.named_parameters()}
    for values in (shadow, kept):
        for name, p in net.named_parameters():
            p.data = values[name]
        net.eval()
        with t.inference_mode():
            yield net(x)


PROGRAMS = [optimizer_of_ones_own, averages_of_weights]


@pytest.mark.parametrize("program", PROGRAMS)
def test_agrees_with_pytorch(program: Callable[[Any], Steps]) -> None:
    ours, theirs = ([x.detach().numpy().copy() for x in program(t)] for t in (ddp, torch))
    for y, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(y, expected, 1e-10, 1e-12)
