"""In the steady state a step makes exactly the calls of its plan and one control message, of exactly their bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives import Communicator
from collectives.flight import layout
from collectives.flight.recorder import process_recorder
from ddp import nn
from ddp.parallel import DataParallel
from ddp.parallel.control import REQUEST_KINDS
from ddp.parallel.planner import WARM
from tests.ddp.parallel.ranks import on_ranks
from tests.ddp.parallel.recorder import Recorder

Calls = list[tuple[str, int]]  # what was called, and the bytes that went in


class Net(nn.Module):
    """Two dtypes, a branch that not every rank takes, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40).double()
        self.branch = nn.Linear(40, 40).double()
        self.never = nn.Linear(40, 40)

    def forward(self, x: ddp.Tensor, branch: bool) -> ddp.Tensor:
        h = self.second(self.first(x).double())
        return self.branch(h) if branch else h


def name_and_bytes(name: str, x: Any) -> tuple[str, int]:
    return name, x.nbytes if isinstance(x, np.ndarray) else 0


def steps(comm: Communicator, count: int, **options: Any) -> Any:
    """(the calls of each step, and those that were planned before it)"""
    calls: Calls = []
    ddp.manual_seed(0)
    seen: Any = Recorder(comm, calls, name_and_bytes)
    model = DataParallel(Net(), seen, **options)
    optimizer = ddp.optim.SGD(model.parameters(), lr=1e-3)
    results = []
    for step in range(count):
        calls.clear()
        planned = planned_calls(model, comm.size)
        optimizer.zero_grad()
        with model.no_sync():
            model(ddp.ones(3, 40), branch=False).sum().backward()
        out = model(ddp.ones(3, 40), branch=comm.rank == 1 and step % 2 == 1)
        out.sum().backward()
        optimizer.step()
        results.append((list(calls), planned))
    return results


def planned_calls(model: DataParallel, size: int) -> Calls:
    """The control message, and the buckets: each gradient begins on a cache line."""
    if size == 1:
        return []
    parameters = len(list(model.module.parameters()))
    control = 8 * (4 + REQUEST_KINDS + parameters + size * (2 + model.reducer.timeline.width))
    shapes = {name: (p.shape, p.dtype.itemsize) for name, p in model.module.named_parameters()}
    results = [control]
    for bucket in model.plan.buckets:
        sizes = [math.prod(shapes[name][0]) * shapes[name][1] for name in bucket]
        results.append(sum(-(-size // 64) * 64 for size in sizes))
    return [("all_reduce", nbytes) for nbytes in results]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("cap", [1e-5, "auto"])
def test_each_step_makes_the_planned_calls_and_one_control_message(size: int, cap: float | str) -> None:
    def rank(comm: Communicator) -> None:
        for number, (calls, planned) in enumerate(steps(comm, 6, bucket_cap_mb=cap, check_every=3)):
            if number == WARM - 1 and size > 1:  # the plan is made from measured times
                assert calls[: len(planned)] == planned
                assert len(calls) > len(planned)
            else:
                assert calls == planned, number

    on_ranks(rank, size)


def test_a_step_is_marked_in_the_flight_record() -> None:
    model = DataParallel(nn.Linear(2, 1), comm=collectives.init())
    for steps in (1, 2):
        with model.no_sync():
            model(ddp.ones(3, 2)).sum().backward()
        model(ddp.ones(3, 2)).sum().backward()
        assert _backwards() == steps


def _backwards() -> int:
    words = memoryview(process_recorder().peek(0, layout.HEADER.size)).cast("q")
    return int(words[layout.BACKWARDS_WORD])
