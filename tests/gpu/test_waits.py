"""Which ops wait for the GPU: only those whose result's shape, or Python number, depends on numbers there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from tests.ddp.cases.table import draw
from tests.ddp.on_devices import At
from tests.ddp.test_ops import CASES
from tests.gpu.test_cases import _compiled  # noqa: F401  # a fixture

pytestmark = pytest.mark.timeout(400)  # where no kernel is compiled yet

#: By op and case: the waits of forward and backward. PyTorch waits there, too.
MUST = {
    # How many elements a mask selects is the result's length; backward knows it.
    ("index", "mask"): (1, 0),
    ("index", "mask and list"): (1, 0),
    ("index", "masked_select"): (1, 0),
    ("setitem", "mask"): (0, 1),  # one number is written anywhere; its gradients are as many as the mask selects
    ("index_add", "mask"): (2, 1),
    ("index", "repeat_interleave"): (1, 0),  # without output_size
}
#: Whether there is a zero decides between a division and a loop.
CUMPROD = (0, 1)
#: The lengths of inputs and targets come to the host, which checks them.
CTC = (2, 0)


def test_of_every_case(gpu: Any, count: Callable[[int, int], int]) -> None:
    """Without --long: of those that wait, and of every fourth of the others."""
    waiting = [case for case in CASES if (case.op, case.label) in MUST or case.op in ("ctc_loss", "cumprod")]
    result: dict[tuple[str, str], Any] = defaultdict(lambda: (0, 0))
    lines = {}
    for case in waiting + CASES[:: count(4, 1)]:
        xs = []
        for array in case.inputs:
            floating = array.dtype == np.float64
            x = ddp.from_numpy(array.astype(np.float32) if floating else array.copy())
            xs.append(x.to("cuda").requires_grad_(floating))
        g = ddp.from_numpy(draw(*case.fn(At("cuda"), *xs).shape, seed=9)).to("cuda")
        gpu.reset()
        y = case.fn(At("cuda"), *xs)
        g = g.to(y.dtype)
        forward = len(gpu.waits)
        if y.requires_grad:
            y.backward(g)
        if gpu.waits:
            result[case.op, case.label] = forward, len(gpu.waits) - forward
            lines[case.op, case.label] = list(gpu.waits)
    ctc = {key: result.pop(key) for key in [*result] if key[0] == "ctc_loss"}
    assert set(ctc.values()) == {CTC}, lines
    cumprods = {key: result.pop(key) for key in [*result] if key[0] == "cumprod"}
    assert set(cumprods.values()) == {CUMPROD}
    assert dict(result) == MUST, {key: line for key, line in lines.items() if result.get(key) != MUST.get(key)}


X: Any = lambda: ddp.rand(4, 5, device="cuda")  # noqa: E731
I: Any = lambda: ddp.tensor([0, 2, 1], device="cuda")  # noqa: E731, E741
#: What is not differentiable, or makes tensors, and has no row in the table of cases.
QUIET: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: getattr(X(), name)()) for name in ("sort", "argsort", "msort", "median", "argmax")},
    **{name: (lambda name=name: getattr(X(), name)(1)) for name in ("argmin", "max", "topk", "kthvalue", "cummax")},
    **{name: (lambda name=name: getattr(X(), name)()) for name in ("bernoulli", "bernoulli_", "normal_", "uniform_")},
    "isin": lambda: ddp.isin(I(), I()),
    "searchsorted": lambda: ddp.searchsorted(X()[0], X()[1]),
    "normal": lambda: ddp.normal(X(), X()),
    "dropout": lambda: ddp.nn.functional.dropout(X()),
    "one_hot": lambda: ddp.nn.functional.one_hot(I(), 3),
    "one number by a mask": lambda: X().__setitem__(X() > 0.5, 1.0),
    "one number by indices": lambda: X().__setitem__(I(), 1.0),
    "unlike numbers": lambda: X() == X(),
    "fetch": lambda: ddp.cuda.fetch(X()),
    "to the CPU": lambda: X().to("cpu", non_blocking=True),
    "from the CPU": lambda: ddp.rand(3).to("cuda"),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_wait(name: str, gpu: Any) -> None:
    QUIET[name]()
    gpu.reset()
    QUIET[name]()
    assert gpu.waits == []


def test_a_schedule_knows_the_rate_that_it_wrote(gpu: Any) -> None:
    rate = ddp.tensor(0.5, device="cuda")
    optimizer = ddp.optim.SGD([ddp.ones(1, device="cuda", requires_grad=True)], lr=rate)
    schedule = ddp.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    gpu.reset()
    schedule.step()
    schedule.step()
    assert gpu.waits == []
    assert schedule.get_last_lr() == [rate.item()] == [0.125]
    rate.fill_(1.0)
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
