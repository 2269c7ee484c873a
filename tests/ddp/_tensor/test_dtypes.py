"""Dtypes: which there are, what they promote to, and what is known of them, all as in PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._tensor.dtypes import SUPPORTED, is_float, parse
from ddp.errors import DtypeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

ALL = sorted(SUPPORTED, key=str)
FLOATS = [ddp.float16, ddp.bfloat16, ddp.float32, ddp.float64]
INTEGERS = [ddp.uint8, ddp.int8, ddp.int16, ddp.int32, ddp.int64]
NUMBERS = [True, 2, 2.5]


def theirs(dtype: Any) -> Any:
    return getattr(torch, dtype.name)


def test_names() -> None:
    for name in ("half", "float", "double", "short", "int", "long", "bool"):
        assert theirs(getattr(ddp, name)) == getattr(torch, name)
    assert isinstance(ddp.float32, ddp.dtype)
    for name in ("pi", "e", "inf", "nan", "newaxis"):
        assert repr(getattr(ddp, name)) == repr(getattr(torch, name))


class TestParse:
    @pytest.mark.parametrize(
        "dtype", [None, "float31", "complex64", complex, "uint16", ">f4", object, [1], {}], ids=str
    )
    def test_refusals(self, dtype: Any) -> None:
        with pytest.raises(DtypeError, match=r"expected one of bfloat16, bool, float16.*uint8$"):
            parse(dtype)

    @pytest.mark.parametrize("dtype", ALL, ids=str)
    def test_is_float(self, dtype: Any) -> None:
        assert is_float(dtype) == theirs(dtype).is_floating_point
        x = ddp.zeros(2, dtype=dtype)
        assert ddp.is_floating_point(x) == x.is_floating_point() == is_float(dtype)
        assert x.is_signed() == theirs(dtype).is_signed
        assert not x.is_complex()
        assert x.element_size() == x.itemsize == theirs(dtype).itemsize
        assert x.nbytes == 2 * x.itemsize


class TestPromotion:
    def test_types(self) -> None:
        for a, b in itertools.product(ALL, ALL):
            assert theirs(ddp.promote_types(a, b)) == torch.promote_types(theirs(a), theirs(b)), (a, b)
            assert ddp.can_cast(a, b) == torch.can_cast(theirs(a), theirs(b)), (a, b)

    def test_tensors_of_any_dimensions(self) -> None:
        for (a, b), i, j in itertools.product(itertools.product(ALL, ALL), (0, 1), (0, 1)):
            x = torch.zeros((1,) * i, dtype=theirs(a))
            y = torch.zeros((1,) * j, dtype=theirs(b))
            ours = ddp.result_type(ddp.zeros((1,) * i, dtype=a), ddp.zeros((1,) * j, dtype=b))
            assert theirs(ours) == torch.result_type(x, y), (a, i, b, j)

    def test_tensors_and_numbers(self) -> None:
        for dtype, number, i in itertools.product(ALL, NUMBERS, (0, 1)):
            x = ddp.zeros((1,) * i, dtype=dtype)
            y = torch.zeros((1,) * i, dtype=theirs(dtype))
            assert theirs(ddp.result_type(x, number)) == torch.result_type(y, number), (dtype, number)
            assert theirs(ddp.result_type(number, x)) == torch.result_type(number, y), (dtype, number)

    def test_numbers_alone(self) -> None:
        for a, b in itertools.product(NUMBERS, NUMBERS):
            assert theirs(ddp.result_type(a, b)) == torch.result_type(a, b), (a, b)


class TestBfloat16:
    def test_gradients_in_their_own_dtype(self) -> None:
        x = ddp.tensor([1.5, -2.0], dtype=ddp.bfloat16, requires_grad=True)
        y = ddp.tensor([2.0, 3.0], requires_grad=True)
        (x * y).sum().backward()
        assert (x.grad.dtype, y.grad.dtype) == (ddp.bfloat16, ddp.float32)
        assert (x.grad.tolist(), y.grad.tolist()) == ([2.0, 3.0], [1.5, -2.0])

    def test_rounds_as_pytorch_does(self) -> None:
        values = np.random.default_rng(0).standard_normal(1000).astype("float32")
        ours = ddp.from_numpy(values).bfloat16()
        expected = torch.from_numpy(values).bfloat16()
        assert ours.tolist() == expected.tolist()
        assert (ours * 3).tolist() == (expected * 3).tolist()
        assert ours.exp().tolist() == pytest.approx(expected.exp().tolist(), rel=2**-7)
        assert isinstance(ours[0].item(), float)


class TestLimits:
    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
    def test_are_pytorchs(self, dtype: Any) -> None:
        info, shown = ("finfo", "eps=") if dtype in FLOATS else ("iinfo", "max=")
        ours = getattr(ddp, info)(dtype)
        expected = getattr(torch, info)(theirs(dtype))
        for name in type(ours).__slots__:
            assert getattr(ours, name) == getattr(expected, name), name
        assert shown in repr(ours)


class TestConversion:
    @pytest.mark.parametrize(
        "name",
        ["half", "bfloat16", "float", "double", "byte", "char", "short", "int", "long", "bool"],
        ids=lambda name: f"{name}()",
    )
    def test_short_forms(self, name: str) -> None:
        for dtype in ALL:
            ours = ddp.tensor([0, 1, 3]).to(dtype)
            expected = torch.tensor([0, 1, 3]).to(theirs(dtype))
            x = getattr(ours, name)()
            y = getattr(expected, name)()
            assert theirs(x.dtype) == y.dtype
            assert x.tolist() == y.tolist()
            assert (x is ours) == (y is expected)

    def test_to(self) -> None:
        x = ddp.tensor([1.7, -2.2])
        for y in (
            x.to(ddp.float64),
            x.to("float64"),
            x.to(dtype=float),
            x.to("cpu", ddp.float64),
            x.to(ddp.float64, True),
            x.to(ddp.device("cpu"), ddp.float64, non_blocking=True),
            x.to(ddp.zeros(1, dtype=ddp.float64)),
        ):
            assert y.dtype == ddp.float64
        assert x.to("cpu") is x.to(None) is x.to(ddp.float32, False, False) is x.cpu() is x
        for y in (x.to(ddp.float32, copy=True), x.to("cpu", False, True), x.to(x, copy=True)):
            assert y is not x
            assert y.tolist() == x.tolist()
            assert not np.shares_memory(y.numpy(), x.numpy())
        assert x.pin_memory() is x

    def test_gradients_pass(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        (x.double() * 2).sum().backward()
        assert x.grad.dtype == ddp.float32
        assert x.grad.tolist() == [2.0, 2.0]
        assert not x.long().requires_grad

    @pytest.mark.parametrize("dtype", ALL, ids=str)
    def test_type(self, dtype: Any) -> None:
        x = ddp.zeros(2, dtype=dtype)
        y = torch.zeros(2, dtype=theirs(dtype))
        assert x.type() == y.type().replace("torch", "ddp")
        assert ddp.zeros(2).type(x.type()).dtype == ddp.zeros(2).type(dtype).dtype == dtype
        assert ddp.zeros(2).type("torch." + x.type()[4:]).dtype == dtype
        assert ddp.zeros(2).type_as(x).dtype == dtype
        with pytest.raises(DtypeError, match="FloatTensor"):
            x.type("ddp.ComplexTensor")


# A function, and its arguments.
MAKERS: list[tuple[Any, ...]] = [
    ("tensor", 1.5),
    ("tensor", [1, 2]),
    ("tensor", np.ones(2, np.float32)),
    ("zeros", 2),
    ("Tensor", 2, 3),
    ("FloatTensor", [1, 2]),
    ("full", (2,), 1.5),
    ("arange", 3),
    ("arange", 3.0),
    ("rand", 2),
    ("normal", 0.0, 1.0, (2,)),
    ("as_tensor", [0.5]),
]
RESULTS: list[Any] = [
    lambda t: t.tensor([1, 2]) / 2,
    lambda t: t.tensor([1, 2]).exp(),
    lambda t: t.zeros(2, dtype=t.float32) * 0.5,
    lambda t: t.nn.Linear(2, 3).weight,
    lambda t: t.nn.Embedding(2, 3).weight,
]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_default_dtype_is_followed_as_in_pytorch(dtype: str) -> None:
    try:
        for t in (ddp, torch):
            t.set_default_dtype(getattr(t, dtype))
        assert ddp.get_default_dtype() == getattr(ddp, dtype)
        assert ddp.finfo().dtype == dtype
        for name, *how in MAKERS:
            assert theirs(getattr(ddp, name)(*how).dtype) == getattr(torch, name)(*how).dtype, (name, how)
        for number, make in enumerate(RESULTS):
            assert theirs(make(ddp).dtype) == make(torch).dtype, number
        assert "dtype" not in repr(ddp.ones(2))
        assert ("dtype" in repr(ddp.ones(2, dtype=ddp.float32))) == (dtype != "float32")
        with pytest.raises(DtypeError, match="set_default_dtype: expected a floating dtype, got int64"):
            ddp.set_default_dtype(ddp.int64)
        assert ddp.get_default_dtype() == getattr(ddp, dtype)
    finally:
        for t in (ddp, torch):
            t.set_default_dtype(t.float32)
