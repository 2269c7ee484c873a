"""Views and copies: which share memory, what they refuse, and what agrees with PyTorch without a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, ShapeError
from tests.ddp._tensor.oracle import agree

F = ddp.nn.functional

# A method, and its arguments.
VIEWS: list[tuple[Any, ...]] = [
    ("reshape", 6, 4),
    ("view", 2, -1),
    ("view", ddp.int32),
    ("flatten",),
    ("unflatten", 2, (2, 2)),
    ("transpose", 0, 1),
    ("permute", 2, 0, 1),
    ("movedim", 0, 2),
    ("squeeze",),
    ("unsqueeze", 1),
    ("expand", 5, 2, 3, 4),
    ("split", 2, 1),
    ("chunk", 2),
    ("tensor_split", (1,), 2),
    ("unbind", 1),
    ("__iter__",),
    ("narrow", 2, 1, 2),
    ("select", 1, 0),
    ("diagonal", 0, 1, 2),
    ("unfold", 2, 2, 1),
    ("as_strided", (2, 2), (1, 2)),
    ("__getitem__", (1, 2, 3)),
]
COPIES: list[tuple[Any, ...]] = [
    ("repeat", 1, 1, 1),
    ("flip", 0),
    ("flip", ()),
    ("roll", 0, 0),
    ("__getitem__", [0, 1]),
    ("__getitem__", ddp.ones(2, 3, 4) > 0),
    ("gather", 0, ddp.zeros(1, 3, 4, dtype=ddp.int64)),
]


def block() -> ddp.Tensor:
    return ddp.arange(24.0).reshape(2, 3, 4).clone()


@pytest.mark.parametrize("call", VIEWS, ids=lambda call: call[0])
def test_a_view_shares_memory_and_version(call: Any) -> None:
    x = block()
    y = getattr(x, call[0])(*call[1:])
    for view in [y] if isinstance(y, ddp.Tensor) else [*y, x.mT, ddp.meshgrid(x[0, 0], x[0, 1])[0]]:
        assert view.version is x.version
        before = view.version.count
        x.fill_(-1)
        assert (view == -1).all() or view.dtype != x.dtype
        assert view.version.count == before + 1


@pytest.mark.parametrize("call", COPIES, ids=lambda call: call[0])
def test_a_copy_does_not(call: Any) -> None:
    x = block()
    for y in (getattr(x, call[0])(*call[1:]), x.transpose(0, 1).reshape(-1), x[0].diag()):
        assert y.version is not x.version
        y.fill_(-1)
        assert x.tolist() == block().tolist()


def test_writing_to_a_view_is_seen() -> None:
    x = block()
    x.diagonal(0, 1, 2).fill_(-1)
    x[1].unfold(1, 2, 2)[0].copy_(ddp.tensor([[1.0, 2.0], [3.0, 4.0]]))
    x.split([1, 2], 1)[1].mul_(2)
    assert x[0].tolist() == [[-1, 1, 2, 3], [8, -2, 12, 14], [16, 18, -2, 22]]
    assert x[1].tolist() == [[1, 2, 3, 4], [32, -2, 36, 38], [40, 42, -2, 46]]
    with pytest.raises(ArgumentError, match="read-only"):  # many elements in one place
        x[:1].expand(3, 3, 4).fill_(0)


def test_a_view_of_another_dtype(torch: Any) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for dtype in ("int32", "float64", "int16", "uint8", "float32", "bfloat16"):
        ours = ddp.from_numpy(array).view(getattr(ddp, dtype))
        theirs = torch.from_numpy(array).view(getattr(torch, dtype))
        assert ours.shape == tuple(theirs.shape)
        assert ours.double().tolist() == theirs.double().tolist()
    with pytest.raises(ShapeError, match=r"view\(float64\) of shape \(3, 3\)"):
        ddp.zeros(3, 3).view(ddp.float64)


ALIKE: dict[str, Any] = {
    "split of nothing": lambda t: t.zeros(0).split(0),
    "chunk many": lambda t: t.arange(3).chunk(5),
    "tensor_split many": lambda t: t.arange(2).tensor_split(3),
    "chunk by NumPy": lambda t: t.arange(7).chunk(np.int64(2)),
    "split by tensor": lambda t: t.arange(7).split(t.tensor(3)),
    "tensor_split by NumPy": lambda t: t.arange(7).tensor_split(np.int64(2)),
    "norm by NumPy": lambda t: t.linalg.norm(t.ones(2, 3), 1, np.int64(0)),
    "norm of a matrix": lambda t: t.linalg.norm(t.ones(2, 3), 1),
    "fft by NumPy": lambda t: t.view_as_real(t.fft.fft(t.arange(4.0), np.int64(2))),
    "layer_norm by NumPy": lambda t: t.nn.LayerNorm(np.int64(3)).weight.detach(),
    "layer_norm by an array": lambda t: t.nn.LayerNorm(np.array([3, 4])).weight.detach(),
    "tensor_split at": lambda t: t.arange(7).tensor_split((2, 5, 9)),
    "tensor_split by tensor": lambda t: t.arange(7).tensor_split(t.tensor([3, -1])),
    "tril_indices": lambda t: t.tril_indices(3, 4, 1),
    "meshgrid": lambda t: t.meshgrid(t.arange(2), t.arange(3), t.tensor(4), indexing="xy"),
    "broadcast_shapes": lambda t: tuple(t.broadcast_shapes((2, 1), (3,), 1)),
    "atleast": lambda t: (
        t.atleast_1d(t.tensor(1)),
        *t.atleast_2d(t.tensor(1), t.arange(2)),
        t.atleast_3d(t.arange(2)),
    ),
    "repeat_interleave": lambda t: t.repeat_interleave(t.tensor([2, 0, 3])),
    "cat promotes": lambda t: t.cat([t.arange(2), t.ones(1)]),
    "cat of nothing": lambda t: t.cat([t.zeros(0), t.zeros(0)], -1),
    "stack promotes": lambda t: t.stack([t.tensor(1), t.tensor(2.5)]),
    "squeeze none": lambda t: t.zeros(1, 2, 1).squeeze(()),
    "squeeze an empty list": lambda t: t.zeros(1, 2, 1).squeeze([]),
    "squeeze by NumPy's integer": lambda t: t.zeros(1, 2, 1).squeeze(np.int64(0)),
    "movedim by NumPy's integers": lambda t: t.zeros(1, 2, 3).movedim(np.int64(0), np.int64(1)),
    "unfold 0-d": lambda t: t.tensor(3.0).unfold(0, 1, 1),
    "pad bfloat16": lambda t: t.nn.functional.pad(t.ones(1, 3, dtype=t.bfloat16), (1, 2), "reflect").float(),
    "one_hot": lambda t: t.nn.functional.one_hot(t.tensor([[0, 2], [1, 0]])),
    "one_hot of nothing": lambda t: t.nn.functional.one_hot(t.zeros(0, dtype=t.int64), 3),
}


@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_agrees_with_pytorch(call: Any, torch: Any) -> None:
    agree(call(ddp), call(torch), rtol=0)
