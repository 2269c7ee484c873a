"""A small model of all that makes sharding hard, and loops that train it with a sharded or an unsharded optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal

import collectives
import ddp
from collectives import Communicator
from ddp import nn, optim
from ddp.nn import functional as F
from ddp.parallel import DataParallel
from ddp.parallel.bucket_plan import Plan
from ddp.parallel.zero import ZeroOptimizer
from tests.ddp.parallel.ranks import Arrays, assert_same

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
    reducer = model.reducer
    placed = [name for bucket in reducer.buckets.members for name in (reducer.buckets.names[i] for i in bucket)]
    params = dict(model.module.named_parameters())
    buckets: list[tuple[str, ...]] = []
    for dtype in sorted({str(params[name].dtype) for name in placed}):
        names = [name for name in placed if str(params[name].dtype) == dtype]
        names = names[rotate % len(names) :] + names[: rotate % len(names)]
        buckets += [tuple(names[start : start + 2]) for start in range(0, len(names), 2)]
    nbytes = tuple(sum(params[name].nbytes for name in bucket) for bucket in buckets)
    reducer._set_plan(Plan(buckets=tuple(buckets), nbytes=nbytes, origin="by the test"))


def values(model: DataParallel) -> Arrays:
    return arrays(dict(model.module.named_parameters()))


def arrays(tensors: Mapping[str, ddp.Tensor]) -> Arrays:
    """Copies; bfloat16 as float32, of which not every comparison knows."""
    detached = {name: x.detach() for name, x in tensors.items()}
    return {name: (x.float() if x.dtype == ddp.bfloat16 else x).numpy().copy() for name, x in detached.items()}


def train(
    model: DataParallel,
    optimizer: optim.Optimizer,
    steps: Sequence[int],
    between: Callable[[int], None] = lambda step: None,
) -> Arrays:
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


def compare(rank: Callable[[Communicator, Make], Any], size: int = 2) -> tuple[Any, list[Any]]:
    """What rank 0 returns with an unsharded optimizer, and what all ranks return with a sharded one."""

    def run(sharded: bool) -> list[Any]:
        def make(model: DataParallel, kind: type[optim.Optimizer], **settings: Any) -> optim.Optimizer:
            return optimizer_of(model, sharded, kind, **settings)

        return collectives.run_threads(lambda comm: rank(comm, make), size)

    return run(False)[0], run(True)


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two state dicts hold the same entries, in the same order, of the same shapes, dtypes and values."""
    assert got["param_groups"] == expected["param_groups"]
    assert sorted(got["state"]) == sorted(expected["state"])
    for number, entry in expected["state"].items():
        assert list(got["state"][number]) == list(entry)
        for name, value in entry.items():
            mine = got["state"][number][name]
            assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device), (number, name)
            assert_array_equal(mine.double().numpy(), value.double().numpy(), err_msg=f"{number} {name}")
