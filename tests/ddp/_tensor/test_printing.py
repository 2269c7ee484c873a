"""What a tensor prints: PyTorch's text, with ddp. for torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from tests.ddp._tensor.oracle import both

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    ddp.set_printoptions(profile="default")
    torch.set_printoptions(profile="default")


RANDOM = np.random.default_rng(0)
VALUES: dict[str, Any] = {
    "fractions": [1.0, 2.5],
    "negative zero": [-0.0, 1.5],
    "0-d fraction": 3.14159,
    "wide range": [0.001, 12.5],
    "nan": [1.0, math.nan],
    "infinite": [math.inf, -math.inf, 0.5],
    "integers": [[1, -20], [300, 4]],
    "matrix": RANDOM.standard_normal((3, 4)),
    "four": np.arange(16).reshape(2, 2, 2, 2),
    "wraps": RANDOM.standard_normal(40) * 10,
    "wide rows": np.arange(100.0).reshape(2, 50),
    "long floats": RANDOM.standard_normal(2000),
    "large cube": np.arange(4000).reshape(10, 20, 20),
    "empty matrix": np.zeros((0, 3)),
    "exponents": [[1e-12, 1e12], [0.0, math.nan]],
}


def text(theirs: Any) -> str:
    """PyTorch's text in our names; torch.float64 is longer, so that it may begin a new line where ours does not."""
    return joined(str(theirs).replace("torch.", "ddp."))


def joined(text: str) -> str:
    return re.sub(r",\n +(?=dtype=)", ", ", text)


FLOATS = (None, "float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "uint8", "bool")


@pytest.mark.parametrize("label", VALUES)
def test_text_is_pytorchs(label: str) -> None:
    values = VALUES[label]
    for dtype in (*FLOATS, *INTEGERS) if np.asarray(values).dtype.kind == "i" else FLOATS:
        ours, expected = both(np.abs(values) % 256 if dtype == "uint8" else values, dtype)
        assert joined(repr(ours)) == text(expected), dtype
        assert str(ours) == repr(ours)


OPTIONS: list[dict[str, Any]] = [
    {"precision": 2},
    {"threshold": 10, "edgeitems": 1},
    {"linewidth": 40},
    {"sci_mode": True},
    {"profile": "short"},
    {"profile": "short", "precision": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: Any) -> None:
    ddp.set_printoptions(**options)
    torch.set_printoptions(**options)
    for label, values in VALUES.items():
        ours, expected = both(values, None)
        assert joined(repr(ours)) == text(expected), label


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: t.ones(1, requires_grad=True), "tensor([1.], requires_grad=True)"),
        (lambda t: t.ones(1, requires_grad=True) * 2, "tensor([2.], grad_fn=<MulBackward0>)"),
        (lambda t: t.ones(2, requires_grad=True).sum(), "tensor(2., grad_fn=<SumBackward0>)"),
        (lambda t: t.nn.Parameter(t.ones(1)), "Parameter containing:\ntensor([1.], requires_grad=True)"),
        (lambda t: t.zeros(0, 3, requires_grad=True), "tensor([], size=(0, 3), requires_grad=True)"),
        (
            lambda t: t.arange(13.0, requires_grad=True),
            "tensor([ 0.,  1.,  2.,  3.,  4.,  5.,  6.,  7.,  8.,  9., 10., 11., 12.],\n       requires_grad=True)",
        ),
    ],
)
def test_notes(make: Any, text: str) -> None:
    assert repr(make(ddp)) == repr(make(torch)) == text


def test_devices_are_named() -> None:
    x = ddp.ones(2)
    x._device = type("device", (), {"xp": np, "type": "cuda", "__str__": lambda self: "cuda:1"})()  # as if
    assert repr(x) == "tensor([1., 1.], device='cuda:1')"


def test_sizes() -> None:
    shape = ddp.zeros(2, 3).shape
    assert isinstance(shape, ddp.Size)
    assert isinstance(ddp.zeros(2, 3).size(), ddp.Size)
    assert shape == (2, 3)
    assert shape.numel() == 6
    assert ddp.Size().numel() == torch.Size().numel() == 1
    assert str(shape) == repr(shape) == repr(torch.Size([2, 3])).replace("torch", "ddp") == "ddp.Size([2, 3])"
    assert f"{shape}" == "(2, 3)"
    a, *rest = shape
    assert (a, rest, shape[-1], shape[1:]) == (2, [3], 3, (3,))


def test_formats() -> None:
    for t in (ddp, torch):
        assert f"{t.tensor(1.5)}" == "1.5"
        assert f"{t.tensor(1.5):.2f} {t.tensor(3):03d}" == "1.50 003"
        assert f"{t.tensor([1.5])}" == "tensor([1.5000])"
        with pytest.raises(TypeError, match="unsupported format"):
            f"{t.tensor([1.5]):.2f}"


def test_grad_fn() -> None:
    x = ddp.ones(2, requires_grad=True)
    y = (x * 2).log_softmax(0)
    assert x.grad_fn is None
    assert ddp.ones(2).grad_fn is None
    assert y.grad_fn.name() == "LogSoftmaxBackward0"
    assert repr(y.grad_fn).startswith("<LogSoftmaxBackward0 object at 0x")
    assert y.grad_fn == y.grad_fn
    assert hash(y.grad_fn) == hash(y.grad_fn)
    ((before, index),) = y.grad_fn.next_functions
    assert before is not None
    assert (before.name(), index) == ("MulBackward0", 0)
    assert [fn and fn.name() for fn, _ in before.next_functions] == ["AccumulateGrad", None]
    assert before.next_functions[0][0].next_functions == ()
    y.sum().backward()
    assert y.grad_fn.next_functions == ()
