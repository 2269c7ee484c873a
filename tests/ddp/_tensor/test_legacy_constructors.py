"""Tensors as PyTorch made them first."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

TYPES = ["BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor"]
TYPES += ["LongTensor", "ShortTensor"]
NAMES = ["Tensor", *TYPES, "BFloat16Tensor"]


@pytest.mark.parametrize("name", ["Tensor", *TYPES])
def test_data_is_copied(name: str) -> None:
    for data in ([[1, 0], [0, 3]], [True], (2, 3), np.arange(3.0), range(3)):
        expected = getattr(torch, name)(data)
        found = getattr(ddp, name)(data)
        assert found.tolist() == expected.tolist()
        assert f"torch.{found.dtype}" == str(expected.dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(), (2,), (2, 3), (np.int64(2), 0)])
def test_sizes_make_memory(name: str, sizes: Any) -> None:
    assert getattr(ddp, name)(*sizes).shape == tuple(getattr(torch, name)(*sizes).shape)


def test_a_tensor_shares_its_memory() -> None:
    x = ddp.zeros(2)
    ddp.FloatTensor(x).fill_(1)
    assert x.tolist() == [1, 1]


def test_wrong_data() -> None:
    with pytest.raises(DtypeError, match="Tensor: a tensor of float32 was expected, not int64"):
        ddp.Tensor(ddp.zeros(2, dtype=ddp.int64))
    with pytest.raises(ArgumentError, match="LongTensor: expected sizes, or one sequence of data, got 2"):
        ddp.LongTensor([1], [2])


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


def test_parameters_of_uninitialised_memory() -> None:
    weight = nn.Parameter(ddp.Tensor(2, 3))
    weight.data.uniform_(-1, 1)
    assert weight.requires_grad
    assert copy.deepcopy(weight).tolist() == weight.tolist()
    assert nn.Buffer(ddp.Tensor([1])).tolist() == [1]
