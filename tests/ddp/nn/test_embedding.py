"""Embeddings beyond their table of cases: the layer, its options, and how wrong use is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_max_norm_shortens_what_is_used(norm_type: float) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    table = np.random.default_rng(0).standard_normal((6, 4)) * np.linspace(0.1, 3, 6)[:, None]
    index = np.array([[5, 1], [5, 0], [3, 1]])
    ours, theirs = ddp.tensor(table, requires_grad=True), torch.tensor(table, requires_grad=True)
    y = nn.functional.embedding(ddp.tensor(index), ours, max_norm=1.5, norm_type=norm_type)
    expected = torch.nn.functional.embedding(torch.tensor(index), theirs, max_norm=1.5, norm_type=norm_type)
    np.testing.assert_allclose(y.detach().numpy(), expected.detach().numpy(), rtol=1e-7)
    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=1e-7)
    y.sum().backward()
    expected.sum().backward()
    assert ours.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("options", [{"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_gradients_of_padding_and_by_frequency_agree_with_pytorch(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    table, index = np.random.default_rng(0).standard_normal((5, 3)), np.array([[1, 0, 4], [1, 1, 2]])
    ours, theirs = ddp.tensor(table, requires_grad=True), torch.tensor(table, requires_grad=True)
    y = nn.functional.embedding(ddp.tensor(index), ours, **options)
    expected = torch.nn.functional.embedding(torch.tensor(index), theirs, **options)
    y.backward(ddp.tensor(table[index] * 3))
    expected.backward(torch.tensor(table[index] * 3))
    np.testing.assert_array_equal(y.detach().numpy(), expected.detach().numpy())
    assert ours.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-12)


def test_padding_row() -> None:
    layer = nn.Embedding(5, 3, padding_idx=-2)
    assert layer.padding_idx == 3
    assert layer.weight[3].abs().sum().item() == 0
    layer(ddp.tensor([3, 3, 1])).sum().backward()
    assert layer.weight.grad is not None
    np.testing.assert_array_equal(layer.weight.grad.sum(1).numpy(), [0, 3, 0, 0, 0])


def test_from_pretrained() -> None:
    table = ddp.randn(4, 2)
    frozen = nn.Embedding.from_pretrained(table)
    assert not frozen.weight.requires_grad
    np.testing.assert_array_equal(frozen(ddp.tensor([2, 0])).numpy(), table.numpy()[[2, 0]])
    assert nn.Embedding.from_pretrained(table, freeze=False).weight.requires_grad
    with pytest.raises(ShapeError, match=r"table \(4,\)"):
        nn.Embedding.from_pretrained(ddp.zeros(4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 1},
        {"max_norm": 2.0},
        {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": -1, "scale_grad_by_freq": True},
    ],
)
def test_repr_and_state_agree_with_pytorch(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours, theirs = nn.Embedding(5, 3, **options), torch.nn.Embedding(5, 3, **options)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_an_index_written_later_does_not_matter() -> None:
    index = ddp.tensor([0, 1])
    layer = nn.Embedding(3, 2)
    y = layer(index)
    index[0] = 2
    y.sum().backward()
    assert layer.weight.grad is not None
    np.testing.assert_array_equal(layer.weight.grad.numpy(), [[1, 1], [1, 1], [0, 0]])


def test_float16() -> None:
    layer = nn.Embedding(3, 70).half()
    layer(ddp.zeros(4096, dtype=ddp.int64)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == ddp.float16
    assert layer.weight.grad.numpy()[0, 0] == 4096  # a running sum in float16 stops at 2048


def test_errors() -> None:
    layer = nn.Embedding(5, 3)
    with pytest.raises(RangeError, match="input 7 is not one of the 5 rows 0 to 4"):
        layer(ddp.tensor([1, 7]))
    with pytest.raises(RangeError, match="input -1"):
        layer(ddp.tensor([-1]))
    with pytest.raises(DtypeError, match="row numbers"):
        layer(ddp.zeros(2))
    with pytest.raises(ShapeError, match=r"weight \(5,\)"):
        nn.functional.embedding(ddp.tensor([0]), ddp.zeros(5))
    with pytest.raises(RangeError, match="padding_idx 5"):
        nn.Embedding(5, 3, padding_idx=5)
    with pytest.raises(ArgumentError, match="sparse"):
        nn.Embedding(5, 3, sparse=True)
    with pytest.raises(ArgumentError, match="sparse"):
        nn.functional.embedding(ddp.tensor([0]), ddp.zeros(5, 3), sparse=True)
