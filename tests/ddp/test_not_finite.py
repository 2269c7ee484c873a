"""Infinities and nan in backward, against PyTorch: what was not selected gets 0, whatever the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from numpy.testing import assert_array_equal

import ddp

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

inf, nan = float("inf"), float("nan")


def pool(t: Any, x: Any, **options: Any) -> Any:
    functional = ddp.nn.functional if t is ddp else torch.nn.functional
    return functional.max_pool2d(x, 2, **options)


class Case(NamedTuple):
    fn: Callable[..., Any]  # fn(t, *inputs)
    inputs: tuple[Any, ...]
    g: Any


CASES = {
    "relu": Case(
        lambda t, x: t.relu(x), ([-1.0, 1.0, -1.0, 0.0, nan, inf, -inf],), [inf, 1.0, nan, nan, 2.0, inf, inf]
    ),
    "where": Case(
        lambda t, x, y: t.where(t.tensor([True, False, True, False]), x, y),
        ([1.0, 2.0, nan, 4.0], [nan, 6.0, 7.0, inf]),
        [inf, nan, -inf, nan],
    ),
    "where broadcast": Case(
        lambda t, x, y: t.where(t.tensor([[True], [False]]), x, y), ([1.0, 2.0], [[3.0]]), [[inf, 1.0], [nan, 2.0]]
    ),
    "clamp": Case(lambda t, x: x.clamp(0.0, 1.0), ([nan, -1.0, 0.5, 2.0, 0.0],), [2.0, inf, nan, -inf, 3.0]),
    **{
        name: Case(
            lambda t, x, y, name=name: getattr(t, name)(x, y),
            ([nan, 1.0, 1.0, 2.0, nan, 3.0], [1.0, nan, 2.0, 2.0, nan, 1.0]),
            [2.0, 3.0, inf, inf, 4.0, nan],
        )
        for name in ("maximum", "minimum", "fmax", "fmin")
    },
    "clamp between": Case(
        lambda t, x, low, high: t.clamp(x, low, high),
        ([-1.0, 0.5, 2.0, 0.0, 1.0, 5.0], [0.0, 0.0, 0.0, 0.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]),
        [inf, nan, -inf, 3.0, inf, 1.0],
    ),
    "nan_to_num": Case(lambda t, x: t.nan_to_num(x, 1.0, 2.0, 3.0), ([nan, inf, -inf, 1.0],), [1.0, 2.0, 3.0, inf]),
    "hardtanh": Case(
        lambda t, x: t.nn.functional.hardtanh(x), ([nan, -2.0, -1.0, 0.5, 1.0, 2.0],), [1.0, inf, nan, 3.0, nan, inf]
    ),
    "leaky_relu": Case(
        lambda t, x: t.nn.functional.leaky_relu(x, 0.5),
        ([nan, -1.0, 0.0, 2.0, inf, -inf],),
        [2.0, inf, 2.0, nan, inf, 4.0],
    ),
    "leaky_relu without a slope": Case(
        lambda t, x: t.nn.functional.leaky_relu(x, 0.0), ([inf, -1.0, 2.0, nan],), [1.0, 2.0, nan, 3.0]
    ),
    "atan2": Case(
        lambda t, y, x: t.atan2(y, x),
        ([0.0, 0.0, inf, nan, 1.0], [0.0, -1.0, 1.0, 1.0, inf]),
        [1.0, 2.0, 3.0, 4.0, 5.0],
    ),
    "threshold": Case(
        lambda t, x: t.nn.functional.threshold(x, 0.5, 7.0), ([nan, -1.0, 0.5, 2.0, inf],), [2.0, inf, nan, 3.0, inf]
    ),
    "hardswish": Case(
        lambda t, x: t.nn.functional.hardswish(x), ([-4.0, -3.0, 0.0, 3.0, 4.0],), [inf, nan, 2.0, 3.0, inf]
    ),
    "max": Case(lambda t, x: x.max(), ([[1.0, nan, nan], [5.0, inf, 0.0]],), 3.0),
    "min": Case(lambda t, x: x.min(), ([1.0, nan, nan],), 3.0),
    "max dim": Case(lambda t, x: x.max(1)[0], ([[1.0, nan, nan], [2.0, 1.0, 2.0]],), [1.0, inf]),
    "min dim": Case(lambda t, x: x.min(1)[0], ([[1.0, nan, nan], [2.0, 1.0, 2.0]],), [1.0, inf]),
    "pow": Case(lambda t, x, y: x**y, ([2.0, 0.0, 3.0], [0.0, 2.0, 0.0]), [inf, 1.0, nan]),
    "pool": Case(pool, ([[[1.0, nan, nan, 2.0, 1.0, 2.0], [nan, 3.0, 1.0, 1.0, 2.0, 0.0]]],), [[[1.0, 2.0, inf]]]),
    "pool framed": Case(
        lambda t, x: pool(t, x, padding=1, stride=1), ([[[1.0, nan], [-inf, 2.0]]],), [[[1.0, 2.0, inf]] * 3]
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_against_pytorch(case: Case) -> None:
    for dtype in ("float16", "float32", "float64"):
        ours = [ddp.tensor(x, dtype=dtype, requires_grad=True) for x in case.inputs]
        theirs = [torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=True) for x in case.inputs]
        y, expected = case.fn(ddp, *ours), case.fn(torch, *theirs)
        assert_array_equal(y.detach().numpy(), expected.detach().numpy())
        y.backward(ddp.tensor(case.g, dtype=dtype))
        expected.backward(torch.tensor(case.g, dtype=getattr(torch, dtype)))
        for a, b in zip(ours, theirs, strict=True):
            assert_array_equal(a.grad.numpy(), b.grad.numpy())


def test_over_dimensions_the_nan_get_the_gradient() -> None:
    # PyTorch's amax answers nan for every element there; its max answers this.
    x = ddp.tensor([[1.0, nan, nan], [1.0, 1.0, 0.0]], requires_grad=True)
    x.amax(1).backward(ddp.tensor([1.0, inf]))
    assert x.grad.tolist() == [[0.0, 0.5, 0.5], [inf, inf, 0.0]]
