"""Averaged models, their statistics and their rates beside PyTorch's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from ddp.errors import ArgumentError
from tests.ddp.nn.against_torch import assert_same_state

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

Make = Callable[[Any, Any], Any]  # (the package, the model)


def multi(averages: Any, models: Any, count: Any) -> None:
    for average, model in zip(averages, models, strict=True):
        average += (model - average) // (count + 1) if str(average.dtype).endswith("int64") else (model - average) / 3


CASES: dict[str, Make] = {
    "mean": lambda t, m: t.optim.swa_utils.AveragedModel(m),
    "mean-buffers": lambda t, m: t.optim.swa_utils.AveragedModel(m, use_buffers=True),
    "own": lambda t, m: t.optim.swa_utils.AveragedModel(m, avg_fn=lambda average, x, n: 0.1 * average + 0.9 * x / n),
    "own-multi": lambda t, m: t.optim.swa_utils.AveragedModel(m, "cpu", multi_avg_fn=multi, use_buffers=True),
    "ema-multi": lambda t, m: t.optim.swa_utils.AveragedModel(
        m, multi_avg_fn=t.optim.swa_utils.get_ema_multi_avg_fn(), use_buffers=True
    ),
}


def network(t: Any) -> Any:
    return t.nn.Sequential(t.nn.Linear(3, 4), t.nn.BatchNorm1d(4), t.nn.Dropout(0.0), t.nn.Linear(4, 2)).double()


def networks() -> tuple[Any, Any]:
    ours, theirs = network(ddp), network(torch)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def batches(t: Any) -> list[Any]:
    generator = np.random.default_rng(0)
    return [t.tensor(generator.standard_normal((6, 3))) for _ in range(4)]


def train(t: Any, model: Any, averaged: Any) -> None:
    optimizer = t.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(t):
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
        averaged.update_parameters(model)


@pytest.mark.parametrize("case", CASES)
def test_averages(case: str) -> None:
    averages = []
    for t, model in zip((ddp, torch), networks(), strict=True):
        averaged = CASES[case](t, model)
        train(t, model, averaged)
        averages.append(averaged)
    assert_same_state(*averages)
    resumed = CASES[case](ddp, network(ddp))
    resumed.load_state_dict(averages[1].state_dict())
    assert_same_state(resumed, averages[1])
    x = np.ones((2, 3))
    ours, theirs = (average.eval() for average in averages)
    expected = theirs(torch.tensor(x)).detach().numpy()
    assert_allclose(ours(ddp.tensor(x)).detach().numpy(), expected, 1e-12)


def test_update_bn() -> None:
    ours, theirs = networks()
    momenta = [0.1, 0.1]
    for t, model in ((ddp, ours), (torch, theirs)):
        model.eval()
        t.optim.swa_utils.update_bn([(x, 0) for x in batches(t)], model, device="cpu")
        t.optim.swa_utils.update_bn(batches(t)[:3], model)
        assert not model.training
        momenta.append(model[1].momentum)
    assert set(momenta) == {0.1}
    assert_same_state(ours, theirs)
    with pytest.raises(RuntimeError):
        ddp.optim.swa_utils.update_bn([ddp.ones(2, 5)], ours)
    assert ours[1].momentum == 0.1


def test_an_average_of_a_data_parallel_model() -> None:
    ours, theirs = networks()
    expected = torch.optim.swa_utils.AveragedModel(theirs)
    train(torch, theirs, expected)

    def rank(comm: Any) -> Any:
        model = ddp.DataParallel(network(ddp), comm)
        model.load_state_dict(ours.state_dict())
        averaged = ddp.optim.swa_utils.AveragedModel(model)
        train(ddp, model, averaged)
        return averaged

    for averaged in collectives.run_threads(rank, size=2):
        assert_same_state(averaged, expected)


RATES: dict[str, Any] = {
    "cos": {"swa_lr": 0.05, "anneal_epochs": 7},
    "linear": {"swa_lr": [0.5, 0.01], "anneal_epochs": 4, "anneal_strategy": "linear"},
    "at once": {"swa_lr": 0.02, "anneal_epochs": 0},
}


def schedules(t: Any, case: str) -> tuple[Any, Any]:
    groups = [{"params": [t.ones(1, requires_grad=True)]}, {"params": [t.ones(1, requires_grad=True)], "lr": 0.3}]
    optimizer = t.optim.SGD(groups, lr=0.1)
    return t.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), t.optim.swa_utils.SWALR(optimizer, **RATES[case])


def rates(schedule: Any, swa: Any, epochs: range) -> list[Any]:
    results = []
    for epoch in epochs:
        swa.optimizer.step()
        (schedule if epoch < 3 else swa).step()
        results.append([group["lr"] for group in swa.optimizer.param_groups])
    return results


@pytest.mark.parametrize("case", RATES)
def test_rates(case: str) -> None:
    ours, theirs = schedules(ddp, case), schedules(torch, case)
    assert_allclose(rates(*ours, range(6)), rates(*theirs, range(6)), rtol=1e-12)
    resumed = schedules(ddp, case)
    for held, saved in zip((resumed[1].optimizer, *resumed), (theirs[1].optimizer, *theirs), strict=True):
        held.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert_allclose(rates(*resumed, range(6, 15)), rates(*theirs, range(6, 15)), rtol=1e-12)
    assert set(ours[1].state_dict()) <= set(theirs[1].state_dict())


def test_bad_arguments() -> None:
    swa_utils = ddp.optim.swa_utils
    with pytest.raises(ArgumentError, match="decay is between 0 and 1"):
        swa_utils.get_ema_multi_avg_fn(1.5)
    optimizer = ddp.optim.SGD(network(ddp).parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="SWALR: expected"):
        swa_utils.SWALR(optimizer, 0.1, anneal_strategy="sin")
    with pytest.raises(ArgumentError, match="anneal_epochs is not negative, got -1"):
        swa_utils.SWALR(optimizer, 0.1, -1)
