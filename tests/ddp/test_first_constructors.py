"""Tensors as PyTorch made them first."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

NAMES = ["Tensor", "BoolTensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"]


@pytest.mark.parametrize("name", NAMES)
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


def test_a_shape_is_sizes() -> None:
    assert ddp.Tensor(ddp.zeros(2, 3).shape).shape == (2, 3)


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
    assert repr(ddp.LongTensor) == "ddp.LongTensor"


def test_parameters_of_uninitialised_memory() -> None:
    weight = nn.Parameter(ddp.Tensor(2, 3))
    weight.data.uniform_(-1, 1)
    assert weight.requires_grad
    assert copy.deepcopy(weight).tolist() == weight.tolist()
    assert nn.Buffer(ddp.Tensor([1])).tolist() == [1]
