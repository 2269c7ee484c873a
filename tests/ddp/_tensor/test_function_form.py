"""Function forms that write their result into memory of the caller's: `out=`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, InplaceError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

NUMBERS = [[1.0, 2.0, 5.0], [3.0, 0.5, 4.0]]
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda t, x, out: t.add(x, 2, alpha=3, out=out),
    "exp": lambda t, x, out: t.exp(x, out=out),
    "matmul": lambda t, x, out: t.matmul(x, x.T, out=out),
    "cat": lambda t, x, out: t.cat([x, x], 1, out=out),
    "sum": lambda t, x, out: t.sum(x, 0, out=out),
    "gather": lambda t, x, out: t.gather(x, 1, t.tensor([[0, 2]]), out=out),
    "clamp": lambda t, x, out: t.clamp(x, 1, 2, out=out),
}


@pytest.mark.parametrize("name", CALLS)
def test_values(name: str) -> None:
    expected = CALLS[name](torch, torch.tensor(NUMBERS), torch.empty(0))
    for dtype in (ddp.float32, ddp.float64):
        for shape in (expected.shape, (0,)):
            out = ddp.zeros(*shape, dtype=dtype)
            assert CALLS[name](ddp, ddp.tensor(NUMBERS), out) is out
            assert out.dtype == dtype
            assert out.shape == expected.shape
            np.testing.assert_allclose(out.numpy(), expected.numpy(), 1e-6)


def test_several_results() -> None:
    x, y = ddp.tensor(NUMBERS), torch.tensor(NUMBERS)
    memory = ddp.empty(2), ddp.empty(0, dtype=ddp.int64)
    found = ddp.max(x, 1, out=memory)
    expected = torch.max(y, 1)
    assert (found.values, found.indices) == memory
    assert found.values.tolist() == expected.values.tolist()
    assert found.indices.tolist() == expected.indices.tolist()
    with pytest.raises(ArgumentError, match="max: out is 2 tensors"):
        ddp.max(x, 1, out=memory[:1])


def test_the_memory_may_be_an_argument_and_its_change_counts() -> None:
    x = ddp.tensor(NUMBERS)
    w = ddp.ones(2, 3, requires_grad=True)
    z = x * w
    ddp.add(x, x, out=x)
    assert x.tolist() == [[2 * number for number in row] for row in NUMBERS]
    with pytest.raises(ddp.errors.VersionError):
        z.sum().backward()


def test_what_does_not_fit() -> None:
    x = ddp.tensor(NUMBERS)
    with pytest.raises(ShapeError, match=r"exp: a result of shape \(2, 3\) does not fit a tensor of shape \(3,\)"):
        ddp.exp(x, out=ddp.zeros(3))
    with pytest.raises(DtypeError, match="exp: a result of float32 does not fit a tensor of int64"):
        ddp.exp(x, out=ddp.zeros(2, 3, dtype=ddp.int64))
    with pytest.raises(DtypeError, match="exp: out is a Tensor, not ndarray"):
        ddp.exp(x, out=np.zeros((2, 3)))


def test_no_gradient_passes() -> None:
    x, w = ddp.tensor(NUMBERS), ddp.ones(2, 3, requires_grad=True)
    for call in (lambda: ddp.mul(x, w, out=x), lambda: ddp.exp(x, out=w)):
        with pytest.raises(InplaceError, match=r"no gradient passes through out=, of shape \(2, 3\)"):
            call()
    with ddp.no_grad():
        assert ddp.exp(x, out=w) is w
    assert w.requires_grad


@pytest.mark.parametrize("name", ["exp", "sum", "round", "tril", "topk", "nan_to_num"])
def test_arguments_that_are_no_tensors(name: str) -> None:
    for wrong in ([1.0], np.ones(3), 2.0, "a"):
        with pytest.raises(DtypeError, match=f"{name}: input is a Tensor, not"):
            getattr(ddp, name)(wrong)


def test_it_is_in_the_signature() -> None:
    found = [list(inspect.signature(function).parameters) for function in (ddp.add, ddp.masked_fill)]
    assert found == [["input", "other", "alpha", "out"], ["input", "mask", "value", "out"]]
