"""A small model of all that makes sharding hard, and loops that train it with a sharded or an unsharded optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ddp
from collectives import Communicator
from ddp import nn, optim
from ddp.nn import functional as F
from ddp.parallel import DataParallel
from ddp.parallel.bucket_plan import Plan
from ddp.parallel.zero import ZeroOptimizer
from tests.ddp.parallel.ranks import Tensors, assert_same, on_ranks

FEATURES, CLASSES, BATCH = 6, 3, 12
assert_equal = functools.partial(assert_same, tolerance=0.0)

OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    (optim.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
]


class Net(nn.Module):
    """Three dtypes; a parameter that is never used, one that only some steps use, one that is frozen, and empty ones.

    Its layers' sizes are such that ranges of ranks cut through them.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        ddp.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 41)
        self.second = nn.Linear(41, 23)
        self.scale = nn.Parameter(ddp.ones(23, dtype=ddp.bfloat16))
        self.last = nn.Linear(23, CLASSES).double()
        self.sometimes = nn.Parameter(ddp.ones(37))
        self.never = nn.Parameter(ddp.ones(5, 5))
        self.frozen = nn.Parameter(ddp.ones(19), requires_grad=False)
        self.empty = nn.Parameter(ddp.ones(0, 3))
        self.scalar = nn.Parameter(ddp.tensor(0.5))

    def forward(self, x: ddp.Tensor, sometimes: bool = False) -> ddp.Tensor:
        h = F.relu(self.second(ddp.tanh(self.first(x)))) * self.scale.float() * self.scalar
        h = h + self.empty.sum()
        if sometimes:
            h = h + self.sometimes.sum()
        if self.frozen.requires_grad:
            h = h + self.frozen.sum()
        return self.last(h.double())


def batch(step: int, rank: int, size: int) -> tuple[ddp.Tensor, ddp.Tensor]:
    """This rank's part of a step's batch."""
    random = np.random.default_rng(step)
    x = random.normal(size=(BATCH, FEATURES)).astype(np.float32)
    t = random.integers(0, CLASSES, BATCH)
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return ddp.from_numpy(x[mine]), ddp.from_numpy(t[mine])


def wrapped(comm: Communicator, seed: int = 0) -> DataParallel:
    """The model in buckets of about a kilobyte."""
    return DataParallel(Net(seed), comm, bucket_cap_mb=0.002, first_bucket_mb=0.001)


def backward(model: DataParallel, step: int, *, sometimes: bool = False) -> None:
    x, t = batch(step, model.comm.rank, model.comm.size)
    F.cross_entropy(model(x, sometimes=sometimes), t).backward()


def replan(model: DataParallel, rotate: int) -> None:
    """Lays all gradients out anew, the parameters of each dtype in another order and in other buckets."""
    placed = [name for bucket in model.plan.buckets for name in bucket]
    params = dict(model.module.named_parameters())
    buckets: list[tuple[str, ...]] = []
    for dtype in sorted({str(params[name].dtype) for name in placed}):
        names = [name for name in placed if str(params[name].dtype) == dtype]
        names = names[rotate % len(names) :] + names[: rotate % len(names)]
        buckets += [tuple(names[start : start + 2]) for start in range(0, len(names), 2)]
    nbytes = tuple(sum(params[name].nbytes for name in bucket) for bucket in buckets)
    model.reducer._set_plan(Plan(buckets=tuple(buckets), nbytes=nbytes, origin="by the test"))


def values(model: DataParallel) -> Tensors:
    """Copies of the parameters."""
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def train(
    model: DataParallel,
    optimizer: optim.Optimizer,
    steps: Sequence[int],
    between: Callable[[int], None] = lambda step: None,
) -> Tensors:
    """Trains; `between` is called before each optimizer step. Returns the parameters."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, sometimes=step % 3 == 2)
        between(step)
        optimizer.step()
    return values(model)


def optimizer_of(model: DataParallel, sharded: bool, kind: type[optim.Optimizer], **settings: Any) -> optim.Optimizer:
    """Over all parameters of the model, those that are frozen too."""
    if sharded:
        return ZeroOptimizer(model, kind, **settings)
    return kind(settings.pop("params", model.module.parameters()), **settings)


Make = Callable[..., optim.Optimizer]  # (model, class, **settings)


def compare(
    rank: Callable[[Communicator, Make], Any], size: int = 2, tolerance: float = 0.0, run: Callable[..., Any] = on_ranks
) -> Any:
    """What a rank returns is the same on all ranks, with a sharded optimizer and an unsharded one: that."""

    def results(sharded: bool) -> list[Any]:
        def make(model: DataParallel, kind: type[optim.Optimizer], **settings: Any) -> optim.Optimizer:
            return optimizer_of(model, sharded, kind, **settings)

        return run(lambda comm: rank(comm, make), size)

    expected, *others = results(False)
    for got in (*others, *results(True)):
        assert_same(got, expected, tolerance)
    return expected
