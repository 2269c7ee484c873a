"""A hook with a state serves one model at a time, with the same settings on all ranks; others are free to be shared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ParallelError
from ddp.parallel import DataParallel
from ddp.parallel.comm_hooks import PowerSGD, TopK
from tests.ddp.parallel.ranks import on_each_of

HOOKS: list[Callable[[], Any]] = [PowerSGD, TopK]


def train(model: DataParallel) -> None:
    for _ in range(2):
        model(ddp.ones(2, 3)).sum().backward()
        model.zero_grad()


def wrapped(comm: Communicator, hook: Any, **options: Any) -> DataParallel:
    return DataParallel(nn.Linear(3, 2), comm, comm_hook=hook, **options)


@pytest.mark.parametrize("make", HOOKS)
@on_each_of(3)
def test_a_hook_in_use_on_one_rank_is_refused_on_all_until_close(comm: Communicator, make: Callable[[], Any]) -> None:
    mine, other = make(), make()
    model = wrapped(comm, mine)
    net = nn.Linear(3, 2)
    said = rf"{make.__name__} serves another model already, on rank 1, .*each model needs a hook object of its own"
    for _ in range(2):  # to be refused claims nothing
        with pytest.raises(ParallelError, match=said):
            DataParallel(net, comm, comm_hook=mine if comm.rank == 1 else other)
    second = DataParallel(net, comm, comm_hook=other)
    train(model)
    train(second)
    model.close()
    third = wrapped(comm, mine)
    model.close()  # once more takes nothing from the next one
    with pytest.raises(ParallelError, match="on ranks 0-2, and remembers"):
        wrapped(comm, mine)
    train(third)


def test_a_hook_of_a_model_that_is_gone_or_was_refused_is_free() -> None:
    hook = TopK()
    net = nn.Linear(3, 2)
    with pytest.raises(ParallelError, match="given plan does not fit") as kept:
        DataParallel(net, comm_hook=hook, plan={"buckets": [["strange"]], "nbytes": [4], "from": "elsewhere"})
    model = DataParallel(net, comm_hook=hook)
    assert kept.value.__traceback__ is not None  # what was half made is not gone yet
    del net, model, kept
    gc.collect()
    DataParallel(nn.Linear(3, 2), comm_hook=hook)
