"""Elementwise forms that end in an underscore: PyTorch's values and gradients, in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, InplaceError, ShapeError
from tests.ddp.cases.table import draw

NAMES = """
    neg negative abs absolute square exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan arcsin
    arctan sinh cosh tanh asinh atanh erf erfc erfinv floor ceil trunc fix round sign frac reciprocal sigmoid relu logit
    nan_to_num
"""
WITH_TENSOR = """
    add sub subtract mul multiply div divide true_divide pow fmod atan2 hypot xlogy clamp_min clamp_max floor_divide
"""
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    **{f"{name}_": lambda x, y, name=name: getattr(x, f"{name}_")() for name in NAMES.split()},
    **{f"{name}_ tensor": lambda x, y, name=name: getattr(x, f"{name}_")(y) for name in WITH_TENSOR.split()},
    "acosh_": lambda x, y: x.add_(1).acosh_(),
    "arccosh_": lambda x, y: x.add_(1).arccosh_(),
    "add_ alpha": lambda x, y: x.add_(y, alpha=2),
    "sub_ number": lambda x, y: x.sub_(3, alpha=2),
    "div_ floor": lambda x, y: x.div_(y, rounding_mode="floor"),
    "div_ trunc": lambda x, y: x.div_(y, rounding_mode="trunc"),
    "remainder_": lambda x, y: x.remainder_(y),
    "pow_ number": lambda x, y: x.pow_(3),
    "pow_ square": lambda x, y: x.pow_(2),
    "clamp_": lambda x, y: x.clamp_(0.3, 0.6),
    "clip_": lambda x, y: x.clip_(max=0.5),
    "clamp_ tensors": lambda x, y: x.clamp_(y, y + 0.1),
    "round_ decimals": lambda x, y: x.round_(decimals=1),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "lerp_ tensor": lambda x, y: x.lerp_(y, y),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y + 1, value=-2),
    "chain": lambda x, y: x.mul_(2).add_(y).sin_().mul_(y).exp_(),
}


# PyTorch has no gradients of these in place.
UNTRACKED = {"asinh_", "atanh_", "acosh_", "arccosh_", "floor_divide_ tensor"}


@pytest.mark.parametrize(
    ("name", "tracked"),
    [(name, tracked) for name in FORMS for tracked in (False, True) if not (tracked and name in UNTRACKED)],
)
def test_agrees_with_pytorch(name: str, tracked: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    a, b = draw(3, 4, low=0.05, high=0.95), draw(4, seed=1, low=0.1, high=0.9)
    x, y = (ddp.tensor(each, requires_grad=tracked) for each in (a, b))
    t, u = (torch.tensor(each, requires_grad=tracked) for each in (a, b))
    ours, theirs = x * 1, t * 1
    memory, version = ours.array, ours.version.count
    result, expected = FORMS[name](ours, y), FORMS[name](theirs, u)
    assert result is ours
    assert ours.array is memory
    assert ours.version.count > version
    np.testing.assert_allclose(ours.detach().numpy(), expected.detach().numpy(), rtol=1e-10, atol=1e-13)
    if tracked:
        result.sum().backward()
        expected.sum().backward()
        for v, w in ((x, t), (y, u)):
            if w.grad is not None:
                np.testing.assert_allclose(v.grad.numpy(), w.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_operators() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    results = []
    for t in (ddp, torch):
        x = before = t.tensor([7, -7, 9])
        x += 2
        x -= 1
        x *= 3
        x //= 2
        x %= 7
        x **= 2
        x |= 8
        x &= 29
        x ^= 3
        x <<= 3
        x >>= 1
        assert x is before
        y = t.tensor([1.0, 2.0])
        y /= 4
        y %= 0.4
        y **= 2
        z = t.tensor([True, False])
        z &= True
        z |= t.tensor([False, True])
        z ^= z
        results.append((x.tolist(), y.tolist(), z.tolist()))
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize(
    "name", ["logical_and_", "logical_or_", "logical_xor_", "bitwise_and_", "bitwise_or_", "bitwise_xor_"]
)
def test_logic(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    x, t = ddp.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    assert getattr(x, name)(ddp.tensor([1, 0, 2, 1])).tolist() == getattr(t, name)(torch.tensor([1, 0, 2, 1])).tolist()
    assert x.logical_not_().tolist() == t.logical_not_().tolist()
    assert x.bitwise_not_().tolist() == t.bitwise_not_().tolist()
    assert x.dtype == ddp.int64


@pytest.mark.parametrize(
    "name",
    ["eq_", "ne_", "lt_", "le_", "gt_", "ge_", "not_equal_", "less_", "less_equal_", "greater_", "greater_equal_"],
)
def test_comparisons(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    for dtype in ("float32", "int64", "bool"):
        for other in (2, [2.0, 0.0, 1.0, 4.0]):
            x, y = (t.tensor([1, 2, 0, 4]).to(getattr(t, dtype)) for t in (ddp, torch))
            a, b = (t.tensor(other) if isinstance(other, list) else other for t in (ddp, torch))
            assert getattr(x, name)(a) is x
            assert x.tolist() == getattr(y, name)(b).tolist()
            assert x.dtype.name == dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_floats(dtype: str) -> None:
    x = ddp.tensor([0.5, 2.0]).to(dtype)
    x.exp_().mul_(2).clamp_(max=4.0).sqrt_()
    assert x.dtype == getattr(ddp, dtype)
    assert x.float().tolist() == pytest.approx([(2 * 2.718281828**0.5) ** 0.5, 2.0], rel=1e-2)


def test_no_warning_of_special_values() -> None:
    assert ddp.zeros(1).log_().tolist() == [-float("inf")]
    assert str(ddp.tensor([-1.0]).sqrt_().item()) == "nan"


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda: ddp.tensor([1]).exp_(), DtypeError, "exp_: a result of float32 does not fit a tensor of int64"),
        (lambda: ddp.tensor([1]).mul_(1.5), DtypeError, "mul_: .* int64"),
        (lambda: ddp.tensor([1]).__itruediv__(2), DtypeError, "div_: .* int64"),
        (lambda: ddp.tensor([True]).bitwise_left_shift_(ddp.tensor([1])), DtypeError, "does not fit a tensor of bool"),
        (lambda: ddp.ones(1).addcmul_(ddp.ones(3), ddp.ones(3)), ShapeError, r"\(3,\) does not fit .* \(1,\)"),
        (lambda: ddp.ones(2).clamp_(), ArgumentError, "min, max"),
        (lambda: ddp.ones(2, requires_grad=True).exp_(), InplaceError, "exp_ .* leaf"),
        (lambda: ddp.ones(2, requires_grad=True).clamp_(0, 1), InplaceError, "clamp_ .* leaf"),
        (lambda: ddp.ones(2, requires_grad=True).sigmoid_(), InplaceError, "sigmoid_ .* leaf"),
    ],
)
def test_wrong_use(wrong: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        wrong()


def test_a_leaf_under_no_grad() -> None:
    x = ddp.ones(2, requires_grad=True)
    with ddp.no_grad():
        x.mul_(3).clamp_(max=2).neg_()
    assert x.tolist() == [-2.0, -2.0]
    assert x.is_leaf
