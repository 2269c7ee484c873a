"""Optimizers on a GPU give the CPU's numbers: bit for bit on the stand-in, and within `ROUNDING` on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp._layout import FlatBuckets, lay_out
from ddp.ops.arrays import BFLOAT16
from tests.gpu import on_both
from tests.gpu.installing import Real
from tests.gpu.test_clipping import _small_chunks  # noqa: F401  # a fixture

SHAPES = [(6, 5), (7,), (), (0, 3), (40, 3), (2, 2, 3), (1,)]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("SparseAdam", {}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
]
SOME = [KINDS[2], KINDS[4], KINDS[8]]
#: On a real GPU, whose pow is not the host's.
ROUNDING: dict[Any, float] = {np.float16: 2e-3, BFLOAT16: 1e-2, np.float32: 1e-6, np.float64: 1e-12}
pytestmark = pytest.mark.filterwarnings("ignore:SparseAdam")
Change = Callable[[list[Any], Any, int], Any]


def parameters(device: str, dtype: Any = np.float32) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        ddp.from_numpy(np.asarray(random.standard_normal(shape)).astype(dtype)).to(device).requires_grad_()
        for shape in SHAPES
    ]


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.03}]


def give(params: list[Any], step: int, missing: bool = True) -> None:
    """Gradients of one step; some parameters have none."""
    random = np.random.default_rng(step)
    for p in params:
        g = np.asarray(random.standard_normal(p.shape))
        left_out = missing and random.random() < 0.3
        p.grad = None if left_out else ddp.from_numpy(g).to(p.device, p.dtype)


def train(
    device: str, kind: tuple[str, dict[str, Any]], dtype: Any = np.float32, steps: int = 8, change: Change | None = None
) -> tuple[list[Any], Any]:
    params = parameters(device, dtype)
    name, settings = kind
    optimizer = getattr(ddp.optim, name)(groups_of(params), **{"lr": 0.01, **settings})
    schedule = ddp.optim.lr_scheduler.StepLR(optimizer, 3)
    for step in range(steps):
        if change is not None:
            optimizer = change(params, optimizer, step) or optimizer
        give(params, step)
        optimizer.step()
        schedule.step()
    return params, optimizer


def assert_same(actual: tuple[list[Any], Any], expected: tuple[list[Any], Any], rounding: float = 0) -> None:
    for p, q in zip(actual[0], expected[0], strict=True):
        assert_near(p, q, rounding)
        ours = actual[1].state.get(p, {})
        theirs = expected[1].state.get(q, {})
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].shape == value.shape
            assert_near(ours[name], value, rounding)


def assert_near(actual: Any, expected: Any, rounding: float) -> None:
    """rounding: 0 asks for the same bits"""
    one, other = (each.detach().cpu().double().numpy() for each in (actual, expected))
    assert_allclose(one, other, rtol=rounding, atol=rounding)


@on_both
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[pytest.mark.long] * (dtype != np.float32 and kind not in SOME))
        for kind in KINDS
        for dtype in ROUNDING
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_cpu(kind: Any, dtype: Any, gpu: Any) -> None:
    steps = 20 if dtype == np.float32 else 6
    rounding = ROUNDING[dtype] if isinstance(gpu, Real) else 0.0
    assert_same(train("cuda", kind, dtype, steps), train("cpu", kind, dtype, steps), rounding)


def swap(params: list[Any], optimizer: Any, step: int) -> None:
    if step == 2:
        for p in params:
            p.data = p.data.clone()


def move_state(params: list[Any], optimizer: Any, step: int) -> None:
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())


def bucket(params: list[Any], optimizer: Any, step: int) -> None:
    if step in (1, 4):
        order = [[6, 5, 4, 3], [2, 1, 0]] if step == 1 else [[0, 1, 2, 3, 4, 5, 6]]
        layout = lay_out(order, [p.shape for p in params], [p.dtype for p in params])
        views = FlatBuckets(layout, lambda n, dtype: ddp.zeros(n, dtype=dtype, device=params[0].device).array).views
        for p, view in zip(params, views, strict=True):
            p.leaf.grad_buffer.bind(view)


@pytest.mark.parametrize("change", [swap, move_state, bucket])
@pytest.mark.parametrize("kind", SOME, ids=str)
def test_what_changes_is_followed(kind: Any, change: Change, gpu: Any) -> None:
    assert_same(train("cuda", kind, change=change), train("cpu", kind, change=change))


@pytest.mark.parametrize("kind", SOME, ids=str)
def test_a_state_goes_on_from_the_cpu_and_back(kind: Any, gpu: Any) -> None:
    def resume(to: str) -> Change:
        def change(params: list[Any], optimizer: Any, step: int) -> Any:
            if step != 3:
                return None
            state = optimizer.state_dict()
            for p in params:
                p.data = p.data.to(to)
            fresh = type(optimizer)(groups_of(params), lr=1.0)
            fresh.load_state_dict(state)
            # The schedule of `train` holds the other one, whose rates this one takes.
            for own, old in zip(fresh.param_groups, optimizer.param_groups, strict=True):
                own["lr"] = old["lr"]
            return fresh

        return change

    for device, to in (("cuda", "cpu"), ("cpu", "cuda")):
        actual = train(device, kind, change=resume(to))
        expected = train("cpu", kind, change=resume("cpu"))
        assert_same(actual, expected)


@pytest.mark.parametrize("kind", SOME, ids=str)
def test_a_step_that_is_left_out_leaves_everything(kind: Any, gpu: Any) -> None:
    name, settings = kind
    result = ddp.zeros(1, device="cuda")

    def trained(device: str) -> Any:
        params = parameters(device)
        optimizer = getattr(ddp.optim, name)(params, lr=0.01, **settings)
        for step, bad in enumerate((True, False, True, True, False, False)):
            give(params, step, missing=False)
            if device == "cuda":
                optimizer.found_inf = result.fill_(bad).array
                optimizer.step()
            elif not bad:
                optimizer.step()
        return params, optimizer

    assert_same(trained("cuda"), trained("cpu"))
