"""Making tensors: values, shapes and dtypes as in PyTorch, and refusals in our own words."""

from __future__ import annotations

import math
import pickle
import typing
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, ShapeError
from tests.ddp._tensor.oracle import agree

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


def theirs(dtype: Any) -> Any:
    return getattr(torch, dtype.name)


FILLED = [ddp.zeros, ddp.ones, ddp.empty, ddp.rand, ddp.randn]


class TestSizes:
    @pytest.mark.parametrize("make", FILLED, ids=lambda make: make.__name__)
    def test_forms(self, make: Any) -> None:
        assert make(2, 3).shape == make((2, 3)).shape == make([2, 3]).shape == make(size=(2, 3)).shape == (2, 3)
        assert make(ddp.Size([2, 3])).shape == (2, 3)
        assert make(()).shape == make().shape == ()
        assert make(0, 3).shape == (0, 3)
        assert make(2).dtype == ddp.float32
        for dtype in (ddp.float16, ddp.bfloat16, ddp.float64):
            assert make(2, dtype=dtype).dtype == dtype
        assert make(2, device="cpu").device is ddp.device("cpu")
        assert make(2, requires_grad=True).requires_grad
        with pytest.raises(ShapeError, match="negative"):
            make(2, -1)

    @pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"])
    def test_like(self, name: str) -> None:
        make = getattr(ddp, name)
        x = ddp.ones(2, 3, dtype=ddp.float64)
        assert make(x).shape == (2, 3)
        assert make(x).dtype == ddp.float64
        assert make(x, dtype=ddp.float32, requires_grad=True).dtype == ddp.float32
        assert make.__name__ == name
        assert not make(ddp.ones(2, requires_grad=True)).requires_grad


class TestConstants:
    @pytest.mark.parametrize("dtype", [None, ddp.float16, ddp.bfloat16, ddp.float64, ddp.bool])
    def test_full(self, dtype: Any) -> None:
        kind = None if dtype is None else theirs(dtype)
        x = ddp.zeros(2, dtype=ddp.float64)
        y = torch.zeros(2, dtype=torch.float64)
        for value in (True, 3, 3.5, math.inf):
            agree(ddp.full((2, 3), value, dtype=dtype), torch.full((2, 3), value, dtype=kind), rtol=0)
            agree(ddp.full_like(x, value, dtype=dtype), torch.full_like(y, value, dtype=kind), rtol=0)

    def test_eye(self) -> None:
        agree(ddp.eye(2, 3), torch.eye(2, 3), rtol=0)
        agree(ddp.eye(2, dtype=ddp.int64), torch.eye(2, dtype=torch.int64), rtol=0)
        agree(ddp.eye(2, dtype=ddp.bfloat16), torch.eye(2, dtype=torch.bfloat16), rtol=0)
        agree(ddp.eye(0), torch.eye(0), rtol=0)


class TestRanges:
    @pytest.mark.parametrize(
        "args",
        [(3,), (0,), (1, 4), (4, 1, -1), (1, 2, 0.25), (5.5,), (0, 1, 0.1), (2, 2), (-3, 3, 2), (1.0, 4), (0, 10, 3)],
    )
    def test_arange(self, args: Any) -> None:
        mixed = any(isinstance(n, float) or n < 0 for n in args)  # which PyTorch rounds in a way of its own to integers
        integers = () if mixed else ("int8", "int32", "uint8")
        for name in (None, "float16", "bfloat16", "float32", "float64", *integers):
            kind = None if name is None else getattr(torch, name)
            agree(ddp.arange(*args, dtype=name), torch.arange(*args, dtype=kind), rtol=0)

    def test_arange_as_integers(self) -> None:
        agree(ddp.arange(0.5, 5, dtype=ddp.int64), torch.arange(0.5, 5, dtype=torch.int64), rtol=0)
        agree(ddp.arange(np.int64(3)), torch.arange(3), rtol=0)
        agree(ddp.arange(ddp.tensor(3)), torch.arange(torch.tensor(3)), rtol=0)
        agree(ddp.arange(start=1, end=5, step=2), torch.arange(start=1, end=5, step=2), rtol=0)
        agree(ddp.arange(2**53, 2**53 + 3), torch.arange(2**53, 2**53 + 3), rtol=0)

    def test_arange_refusals(self) -> None:
        for args in ((1, 2, 0), (3, 1), (1, 3, -1), (math.inf,)):
            with pytest.raises(ArgumentError, match="expected finite steps that lead there"):
                ddp.arange(*args)
        with pytest.raises(ArgumentError, match=r"step 0.5 is 0 as an integer"):
            ddp.arange(0, 5, 0.5, dtype=ddp.int64)

    @pytest.mark.parametrize("args", [(0, 1, 5), (3, -3, 4), (0, 10, 1), (2, 2, 3), (0, 1, 0), (-1.5, 7.25, 11)])
    def test_linspace(self, args: Any) -> None:
        for dtype in (None, ddp.float64, ddp.int64):
            kind = None if dtype is None else theirs(dtype)
            agree(ddp.linspace(*args, dtype=dtype), torch.linspace(*args, dtype=kind), 1e-6, 1e-6)
            agree(ddp.logspace(*args, base=2, dtype=dtype), torch.logspace(*args, base=2, dtype=kind), 1e-5, 1e-5)


TYPES = ["BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor"]
TYPES += ["LongTensor", "ShortTensor"]


@pytest.mark.parametrize("name", ["Tensor", *TYPES])
def test_data_is_copied(name: str) -> None:
    for data in ([[1, 0], [0, 3]], [True], (2, 3), np.arange(3.0), range(3)):
        expected = getattr(torch, name)(data)
        actual = getattr(ddp, name)(data)
        assert actual.tolist() == expected.tolist()
        assert f"torch.{actual.dtype}" == str(expected.dtype)


@pytest.mark.parametrize("name", ["Tensor", *TYPES, "BFloat16Tensor"])
def test_sizes_make_memory(name: str) -> None:
    for sizes in ((), (2,), (2, 3), (np.int64(2), 0)):
        assert getattr(ddp, name)(*sizes).shape == tuple(getattr(torch, name)(*sizes).shape)


def test_type_takes_them() -> None:
    assert ddp.zeros(2).type(ddp.LongTensor).dtype == ddp.int64
    assert ddp.zeros(2, dtype=ddp.LongTensor).dtype == ddp.int64
    assert repr(ddp.LongTensor) == "ddp.LongTensor"
    assert pickle.loads(pickle.dumps(ddp.LongTensor)) is ddp.LongTensor


@pytest.mark.parametrize("name", [*TYPES, "BFloat16Tensor"])
def test_they_are_types(name: str) -> None:
    for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        ours, theirs = (t.zeros(2, dtype=getattr(t, dtype)) for t in (ddp, torch))
        assert isinstance(ours, getattr(ddp, name)) == isinstance(theirs, getattr(torch, name))
        assert not isinstance(ours, getattr(ddp.cuda, name))
    assert isinstance(getattr(ddp, name), type)
    assert not isinstance(np.zeros(2), getattr(ddp, name))
    assert isinstance(nn.Parameter(ddp.zeros(2)), ddp.FloatTensor)


def test_annotations_as_models_have_them() -> None:
    def forward(ids: ddp.LongTensor | None = None, mask: ddp.FloatTensor | ddp.BoolTensor | None = None) -> None: ...

    # Evaluated where the module does not import annotations from the future.
    hints = typing.get_type_hints(forward, {"ddp": ddp})
    assert hints["ids"] == ddp.LongTensor | None == typing.Optional[ddp.LongTensor]  # noqa: UP045
    x = ddp.zeros(2, dtype=ddp.int64)
    assert isinstance(x, ddp.LongTensor | None)
    assert not isinstance(x, ddp.FloatTensor | ddp.BoolTensor)
