"""Tensor: operators, views, what it says of itself and how it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import DeviceError


class TestPromotion:
    def test_numpy_operands(self) -> None:
        x = ddp.ones(2)
        assert (x * np.float64(2)).dtype == ddp.float32
        for y in (x + np.ones(2, np.float32), np.ones(2, np.float32) + x):
            assert isinstance(y, ddp.Tensor)
            assert y.tolist() == [2.0, 2.0]

    def test_numpy_matrices(self) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        x = ddp.ones(3, requires_grad=True)
        y = array @ x
        assert isinstance(y, ddp.Tensor)
        assert y.tolist() == [3.0, 12.0]
        array[:] = 0  # backward has a copy
        y.sum().backward()
        assert x.grad.tolist() == [3.0, 5.0, 7.0]
        assert (x @ np.ones((3, 2), np.float32)).requires_grad
        assert x.matmul(np.ones(3, np.float32)).item() == 3.0


class TestValues:
    def test_metadata(self) -> None:
        x = ddp.zeros(2, 3)
        assert (x.shape, x.size(), x.size(1), x.size(-2), len(x)) == ((2, 3), (2, 3), 3, 2, 2)
        assert x.ndim == x.dim() == x.ndimension() == 2
        assert x.numel() == x.nelement() == ddp.numel(x) == 6
        assert x.device is ddp.device("cpu")
        assert (x.is_cpu, x.is_cuda, x.get_device()) == (True, False, -1)
        assert x.is_leaf
        assert ddp.is_tensor(x)
        assert not ddp.is_tensor([1.0])

    def test_as_numbers(self) -> None:
        x = ddp.tensor([1.7, -2.2, 0.0])
        assert (float(x[0]), int(x[1]), bool(x[0]), bool(x[2])) == (pytest.approx(1.7), -2, True, False)
        assert [10, 20, 30][ddp.tensor(1)] == 20
        assert len({x, x.detach(), x}) == 2  # by identity
        assert (x == "text") is False

    def test_iteration(self) -> None:
        assert [row.tolist() for row in ddp.tensor([[1, 2], [3, 4]])] == [[1, 2], [3, 4]]


class TestInPlace:
    def test_every_write_counts(self) -> None:
        x = ddp.ones(2)
        x.add_(1)
        x[0] = 3
        x.fill_(1)
        x.normal_()
        x.uniform_()
        x.copy_(x * 2)
        assert x.version.count == 6


class TestMessages:
    def test_other_devices_are_named(self) -> None:
        x, y = ddp.zeros(2), ddp.zeros(2)
        y._device = ddp.device("cuda:1")  # as if: no GPU is needed to be refused
        with pytest.raises(DeviceError, match="add: one tensor is on cpu, another on cuda:1"):
            x + y
        with pytest.raises(DeviceError, match="add_: one tensor is on cpu, another on cuda:1"):
            x.add_(y)
        with pytest.raises(DeviceError, match=r"cpu\(\)"):
            y.numpy()


class TestGrad:
    def test_life_of_a_gradient(self) -> None:
        x = ddp.zeros(2, requires_grad=True)
        g = ddp.ones(2)
        assert x.grad is None
        x.grad = g
        assert x.grad is x.grad
        assert not np.shares_memory(x.grad.array, g.array)
        x.grad.mul_(3)
        assert x.leaf.grad_buffer.array.tolist() == [3.0, 3.0]
        for remove in (lambda: setattr(x, "grad", None), lambda: delattr(x, "grad")):
            x.grad = g
            remove()
            assert x.grad is None
            assert not x.leaf.grad_buffer.full

    def test_requires_grad_off_and_on_keeps_the_leaf(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        end = x.leaf
        x.requires_grad = False
        assert not (x * 2).requires_grad
        x.requires_grad_()
        assert x.leaf is end


def test_errors_of_python_name_the_class_that_users_know() -> None:
    x: Any = ddp.ones(2)
    for call, name in (
        (lambda: x.clone(1, 2), "clone"),
        (lambda: x.add_(), "add_"),
        (lambda: x.sum(0, other=1), "sum"),
        (lambda: x.sort(other=1), "sort"),
        (lambda: x.requires_grad_(1, 2), "requires_grad_"),
    ):
        with pytest.raises(TypeError, match=rf"Tensor\.{name}\(\)"):
            call()

    assert pickle.loads(pickle.dumps(ddp.Tensor.clone)) is ddp.Tensor.clone
