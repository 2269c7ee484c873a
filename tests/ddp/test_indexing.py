"""Indexing against PyTorch: one table of indices, each read, written and differentiated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import RangeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

# Each takes the module, so that its tensors may be ddp's or torch's.
INDICES = {
    "int, slice, list": lambda t: (0, slice(None), [0, 1, 2]),
    "list, slice, int": lambda t: ([0, 2], slice(None), 1),
    "slice, int, list": lambda t: (slice(1, None), -1, [2, 0, 0]),
    "int between lists": lambda t: ([0, 1], 2, [1, 1]),
    "int before lists": lambda t: (1, [0, 1], [1, 2]),
    "two ints, list": lambda t: (0, 1, [2, 2]),
    "int, list": lambda t: (2, [0, 1]),
    "int, tensor of two dimensions": lambda t: (1, slice(None), t.tensor([[0, 1], [2, 0]])),
    "0-d tensor, slice, list": lambda t: (t.tensor(1), slice(None), [0, 2]),
    "0-d tensor, slice, tensor": lambda t: (t.tensor(-1), slice(0, 2), t.tensor([1])),
    "0-d tensors alone": lambda t: (t.tensor(0), slice(None), t.tensor(2)),
    "NumPy integer, slice, list": lambda t: (np.int64(1), slice(None), [0, 2]),
    "int, None, list": lambda t: (0, None, [0, 1]),
    "int, None, slice, list": lambda t: (0, None, slice(None), [0, 1]),
    "list, None, int": lambda t: ([0, 1], None, 0),
    "int, Ellipsis, list": lambda t: (0, ..., [0, 1]),
    "list, Ellipsis, int": lambda t: ([0, 1, 1], ..., 0),
    "Ellipsis, int, list": lambda t: (..., 1, [0, 1]),
    "int, mask": lambda t: (0, t.tensor([[True, False, True]] * 3)),
    "int, slice, mask": lambda t: (0, slice(None), t.tensor([True, False, True])),
    "mask, int": lambda t: (t.tensor([[True, False, True]] * 3), 1),
    "lists apart": lambda t: ([0, 1], slice(None), [1, 2]),
    "ints alone": lambda t: (0, slice(None), 1),
    "int, True": lambda t: (0, slice(None), True),
    "empty list": lambda t: (0, slice(None), []),
}


def cube(t: Any, **options: Any) -> Any:
    return t.arange(27, dtype=t.float64).reshape(3, 3, 3).clone().requires_grad_(options.get("grad", False))


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
class TestAgainstPyTorch:
    def test_read(self, index: Any) -> None:
        ours, theirs = cube(ddp, grad=True), cube(torch, grad=True)
        y, expected = ours[index(ddp)], theirs[index(torch)]
        assert y.shape == tuple(expected.shape)
        assert y.tolist() == expected.tolist()
        weight = np.arange(1.0, 1 + np.prod(y.shape)).reshape(y.shape)
        y.backward(ddp.tensor(weight))
        expected.backward(torch.tensor(weight))
        assert ours.grad.tolist() == theirs.grad.tolist()

    def test_write(self, index: Any) -> None:
        ours, theirs = cube(ddp), cube(torch)
        values = -1.0 - np.arange(np.prod(theirs[index(torch)].shape)).reshape(theirs[index(torch)].shape)
        ours[index(ddp)] = ddp.tensor(values)
        theirs[index(torch)] = torch.tensor(values)
        assert ours.tolist() == theirs.tolist()


def test_a_single_integer_tensor_gives_a_view() -> None:
    x = cube(ddp)
    x[ddp.tensor(1), :, 0].fill_(-1)
    assert x[1].tolist() == [[-1.0, 10.0, 11.0], [-1.0, 13.0, 14.0], [-1.0, 16.0, 17.0]]


@pytest.mark.parametrize("where", [(3, slice(None), [0]), (0, slice(None), [3]), (0, 0, 0, [0])])
def test_out_of_range(where: Any) -> None:
    with pytest.raises(RangeError, match=r"indexing a tensor of shape \(3, 3, 3\)"):
        cube(ddp)[where]
    with pytest.raises(RangeError, match=r"on a tensor of shape \(3, 3, 3\)"):
        cube(ddp)[where] = 1
