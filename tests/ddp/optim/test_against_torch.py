"""Ten steps of every optimizer, beside PyTorch's: the same gradients, some missing, tensors of all shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp._tensor import dtypes

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

SHAPES = [(64, 33), (7,), (), (0, 3), (3, 4, 5), (3000,), (16,)]
CASES: list[tuple[Any, ...]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.3, "amsgrad": True, "maximize": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "centered": True, "alpha": 0.9}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.7, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    ("NAdam", {}),
    ("NAdam", {"lr": 0.01, "betas": (0.8, 0.95), "momentum_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RAdam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    ("RAdam", {"lr": 0.01, "betas": (0.9, 0.6), "weight_decay": 0.1, "decoupled_weight_decay": True}),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in CASES]


def gradients(steps: int, shapes: list[tuple[int, ...]], dtype: str = "float32") -> Iterator[list[Any]]:
    """For each step a gradient of each shape, about every fourth missing after the first steps."""
    random = np.random.default_rng(1)
    for step in range(steps):
        missing = random.random(len(shapes)) < (0.25 if step > 1 else 0.0)
        missing[1] = step < 2  # begins late
        yield [
            None if gone else random.standard_normal(shape).astype(dtype)
            for gone, shape in zip(missing, shapes, strict=True)
        ]


def pair(name: str, options: dict[str, Any], dtype: str = "float32", shapes: Any = SHAPES) -> tuple[Any, ...]:
    """The same parameters here and there, and an optimizer of each."""
    random = np.random.default_rng(0)
    values = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    ours = [ddp.tensor(value, requires_grad=True) for value in values]
    theirs = [torch.tensor(value, requires_grad=True) for value in values]
    return ours, theirs, getattr(ddp.optim, name)(ours, **options), getattr(torch.optim, name)(theirs, **options)


def assign(ours: Any, theirs: Any, given: list[Any]) -> None:
    for p, q, g in zip(ours, theirs, given, strict=True):
        p.grad = None if g is None else ddp.tensor(g)
        q.grad = None if g is None else torch.tensor(g)


def assert_same(ours: Any, theirs: Any, dtype: str = "float32") -> None:
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-13}
    for p, q in zip(ours, theirs, strict=True):
        assert_allclose(p.array, q.detach().numpy(), **tolerance)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_ten_steps(name: str, options: Any) -> None:
    ours, theirs, optimizer, oracle = pair(name, options)
    for given in gradients(10, SHAPES):
        assign(ours, theirs, given)
        optimizer.step()
        oracle.step()
        for p, g in zip(ours, given, strict=True):
            assert g is None or np.array_equal(p.grad.array, g), "a gradient is only read"
    assert_same(ours, theirs)
    compare_states(optimizer.state_dict(), oracle.state_dict())


def compare_states(mine: dict[str, Any], expected: dict[str, Any]) -> None:
    for group, wanted in zip(mine["param_groups"], expected["param_groups"], strict=True):
        assert list(group) == ["params", *(key for key in wanted if key != "params")] or group == wanted
        assert {**group, "params": None} == {**wanted, "params": None}
    assert sorted(mine["state"]) == sorted(expected["state"])
    for number, entry in expected["state"].items():
        assert sorted(mine["state"][number]) == sorted(entry)
        for key, value in entry.items():
            actual = mine["state"][number][key]
            assert actual.shape == tuple(value.shape)
            assert_allclose(actual.array, value.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_a_state_dict_of_pytorch_goes_on_here(name: str, options: Any) -> None:
    shapes = SHAPES[:1] + SHAPES[2:]
    ours, theirs, _, oracle = pair(name, options, shapes=shapes)
    given = list(gradients(10, shapes))
    for each in given[:5]:
        assign(ours, theirs, each)
        oracle.step()
    with ddp.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(ddp.tensor(q.detach().numpy()))
    optimizer = getattr(ddp.optim, name)(ours, lr=99.0)
    state = oracle.state_dict()
    optimizer.load_state_dict(state)
    for each in given[5:]:
        assign(ours, theirs, each)
        optimizer.step()
        oracle.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[0] in ("NAdam", "RAdam")])
def test_twenty_steps_in_float64_while_betas_change(name: str, options: Any) -> None:
    ours, theirs, optimizer, oracle = pair(name, options, "float64")
    for step, given in enumerate(gradients(20, SHAPES, "float64")):
        assign(ours, theirs, given)
        for each in (optimizer, oracle):
            first, second = each.param_groups[0]["betas"]
            each.param_groups[0]["betas"] = (first * (0.99 if step % 2 else 1.005), second)
            each.step()
    for p, q in zip(ours, theirs, strict=True):
        assert_allclose(p.array, q.detach().numpy(), rtol=1e-12, atol=1e-12)
    compare_states(optimizer.state_dict(), oracle.state_dict())


def lion(p: Any, m: Any, g: Any, lr: float, betas: tuple[float, float], decay: float) -> tuple[Any, Any]:
    """Algorithm 2 of the paper, in NumPy."""
    c = betas[0] * m + (1 - betas[0]) * g
    return p - lr * (np.sign(c) + decay * p), betas[1] * m + (1 - betas[1]) * g


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion(decay: float, maximize: bool) -> None:
    values = [np.random.default_rng(0).standard_normal(shape) for shape in SHAPES]
    moments = [np.zeros(shape) for shape in SHAPES]
    params = [ddp.tensor(value, requires_grad=True) for value in values]
    optimizer = ddp.optim.Lion(params, lr=0.05, betas=(0.9, 0.95), weight_decay=decay, maximize=maximize)
    for given in gradients(10, SHAPES, "float64"):
        for i, (p, g) in enumerate(zip(params, given, strict=True)):
            p.grad = None if g is None else ddp.tensor(g)
            if g is not None:
                values[i], moments[i] = lion(values[i], moments[i], -g if maximize else g, 0.05, (0.9, 0.95), decay)
        optimizer.step()
    for p, value, m in zip(params, values, moments, strict=True):
        assert_allclose(p.array, value, rtol=1e-11, atol=1e-13)
        assert_allclose(optimizer.state[p]["exp_avg"].array, m, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[0] in ("SGD", "AdamW")])
def test_half_precision_computes_in_float32_and_rounds_once(name: str, options: Any, dtype: str) -> None:
    # One step from equal values: what float32 gives, rounded.
    wide, _, reference, _ = pair(name, options)
    kind = getattr(dtypes, dtype)
    with ddp.no_grad():
        for p in wide:
            p.copy_(p.to(kind).to(ddp.float32))
    half = [p.detach().to(kind).requires_grad_() for p in wide]
    optimizer = getattr(ddp.optim, name)(half, **options)
    given = [ddp.tensor(g).to(kind) for g in list(gradients(9, SHAPES))[-1] if g is not None]
    assert given
    for params, cast in ((wide, ddp.float32), (half, kind)):
        for p in params:
            p.grad = next((g.to(cast) for g in given if g.shape == p.shape), None)
    reference.step()
    optimizer.step()
    for p, q in zip(half, wide, strict=True):
        assert p.dtype == kind
        assert_array_equal(p.array, q.array.astype(kind))
