"""Embeddings beyond their table of cases: the layer, its options, and how wrong use is answered."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError, warn_once
from tests.ddp.nn.against_torch import agree, check_refusals, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")

TABLE = np.random.default_rng(0).standard_normal((6, 4)) * np.linspace(0.1, 3, 6)[:, None]
INDEX = np.array([[5, 1], [5, 0], [3, 1]])


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.5},
        {"max_norm": 1.5, "norm_type": 1.0, "padding_idx": -1, "scale_grad_by_freq": True},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
    ],
)
def test_agrees_with_pytorch(options: Any) -> None:
    layers = [t.nn.Embedding(6, 4, **options, _weight=t.tensor(TABLE)) for t in (ddp, torch)]
    assert repr(layers[0]) == repr(layers[1])
    assert list(layers[0].state_dict()) == list(layers[1].state_dict())
    agree(*layers, INDEX, rtol=1e-7)
    weights = [layer.weight.detach().numpy() for layer in layers]  # shortened in place
    assert_allclose(*weights, rtol=1e-7)


RAGGED = np.array([5, 1, 5, 0, 3, 1, 1]), np.array([0, 3, 3, 5])
BAGS: list[tuple[Any, ...]] = [
    ((INDEX,), {}),
    (RAGGED, {}),
    (RAGGED, {"padding_idx": 1}),
    ((RAGGED[0], np.array([0, 3, 3, 7])), {"include_last_offset": True, "padding_idx": -5}),
    ((np.zeros(0, np.int64), np.array([0, 0])), {}),
]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("arrays", "options"), BAGS)
def test_bags_agree_with_pytorch(arrays: Any, options: Any, mode: str) -> None:
    layers = [t.nn.EmbeddingBag(6, 4, mode=mode, **options, _weight=t.tensor(TABLE)) for t in (ddp, torch)]
    assert repr(layers[0]) == repr(layers[1])
    assert list(layers[0].state_dict()) == list(layers[1].state_dict())
    if arrays[0].size or mode != "max":  # whose empty result requires no gradient in PyTorch
        agree(*layers, *arrays)


@pytest.mark.parametrize(
    ("arrays", "options"),
    [(RAGGED, {"padding_idx": 1}), ((INDEX, None), {"max_norm": 1.5})],
)
def test_weighted_bags_agree_with_pytorch(arrays: Any, options: Any) -> None:
    factors = np.linspace(-1, 2, arrays[0].size).reshape(arrays[0].shape)

    def run(t: Any, table: Any, factors: Any) -> Any:
        index, offsets = (None if array is None else t.tensor(array) for array in arrays)
        settings = {"mode": "sum", "per_sample_weights": factors, **options}
        return t.nn.functional.embedding_bag(index, table, offsets, **settings)

    agree(lambda *given: run(ddp, *given), lambda *given: run(torch, *given), TABLE, factors, rtol=1e-7)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        table = ddp.tensor([[1.0, -2], [1, -2], [0, -3]], dtype=getattr(ddp, dtype), requires_grad=True)
        nn.functional.embedding_bag(ddp.tensor([[2, 1, 0]]), table, mode="max").sum().backward()
        assert table.grad is not None
        assert table.grad.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_bags_scale_gradients_by_frequency() -> None:  # PyTorch 2.13 divides by another row's count on the CPU
    table = ddp.ones(6, 1, requires_grad=True)
    nn.functional.embedding_bag(ddp.tensor(INDEX), table, mode="sum", scale_grad_by_freq=True).sum().backward()
    assert table.grad is not None
    assert table.grad.flatten().tolist() == [1, 1, 0, 1, 0, 1]


def test_bags_of_a_given_table() -> None:
    layer = nn.EmbeddingBag.from_pretrained(ddp.tensor(TABLE), True, None, 2.0, False, "sum")
    assert not layer.weight.requires_grad
    assert_allclose(layer(ddp.tensor(INDEX)).numpy(), TABLE[INDEX].sum(1))


def test_padding_row() -> None:
    layer = nn.Embedding(5, 3, padding_idx=-2)
    assert layer.padding_idx == 3
    assert layer.weight[3].abs().sum().item() == 0
    layer(ddp.tensor([3, 3, 1])).sum().backward()
    assert layer.weight.grad is not None
    assert_array_equal(layer.weight.grad.sum(1).numpy(), [0, 3, 0, 0, 0])


def test_from_pretrained() -> None:
    table = ddp.randn(4, 2)
    frozen = nn.Embedding.from_pretrained(table)
    assert not frozen.weight.requires_grad
    assert_array_equal(frozen(ddp.tensor([2, 0])).numpy(), table.numpy()[[2, 0]])
    assert nn.Embedding.from_pretrained(table, freeze=False).weight.requires_grad


def test_an_index_written_later_does_not_matter() -> None:
    index = ddp.tensor([0, 1])
    layer = nn.Embedding(3, 2)
    y = layer(index)
    index[0] = 2
    y.sum().backward()
    assert layer.weight.grad is not None
    assert_array_equal(layer.weight.grad.numpy(), [[1, 1], [1, 1], [0, 0]])


def test_sparse_gradients_are_dense_and_sparse_adam_trains_with_them_as_pytorch_does() -> None:
    warn_once.cache_clear()
    tables, texts = [], []
    for t in (ddp, torch):
        layer = t.nn.Embedding(6, 4, sparse=True, _weight=t.tensor(TABLE))
        texts.append(repr(layer))
        said = pytest.warns(UserWarning, match="dense") if t is ddp else contextlib.nullcontext()
        with said as warned:
            optimizer = t.optim.SparseAdam(layer.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-3)
            for step in range(6):  # row 2 is never used, others not always
                optimizer.zero_grad()
                (layer(t.tensor(INDEX[: 1 + step % 3])) * t.tensor(TABLE[step])).sum().backward()
                optimizer.step()
        tables.append(layer.weight.detach().numpy())
        if t is ddp:
            assert [str(each.message)[:6] for each in warned] == ["Sparse", "embedd"]
            assert layer.weight.grad.shape == (6, 4)
    assert texts[0] == texts[1]
    assert_allclose(*tables, rtol=1e-12)
    assert_array_equal(tables[0][2], TABLE[2])


def test_refusals() -> None:
    layer = nn.Embedding(5, 3)
    look_up = nn.functional.embedding
    one = ddp.tensor([0])
    check_refusals(
        {
            RangeError: {
                "input 7 is not one of the 5 rows 0 to 4": lambda: layer(ddp.tensor([1, 7])),
                "padding_idx 5": lambda: nn.Embedding(5, 3, padding_idx=5),
            },
            DtypeError: {"row numbers": lambda: layer(ddp.zeros(2))},
            ShapeError: {r"weight \(5,\)": lambda: look_up(one, ddp.zeros(5))},
        }
    )
    bag = nn.functional.embedding_bag
    ten = ddp.zeros(5, 3)
    two, offsets = ddp.tensor([0, 1]), ddp.tensor([0, 2, 1])
    check_refusals(
        {
            ShapeError: {
                r"input \(2,\): expected \(B, N\)": lambda: bag(two, ten),
                r"input \(1, 2\): expected": lambda: bag(two[None], ten, two),
                "int64 offsets": lambda: bag(two, ten, two.double()),
            },
            RangeError: {
                "begin with 0, do not descend": lambda: bag(two, ten, offsets),
                "the 2 numbers of the input": lambda: bag(two, ten, two, include_last_offset=True),
                "begin with 0": lambda: bag(two, ten, two + 1),
                "end within the 2 numbers": lambda: bag(two, ten, two[:0]),
                "end within the 0 numbers": lambda: bag(two[:0], ten, two[:0], include_last_offset=True),
                "input 5 is not one of the 5 rows": lambda: bag(two + 4, ten, two),
            },
            ArgumentError: {
                "not 'median'": lambda: bag(two[None], ten, mode="median"),
                "expected 'sum'": lambda: bag(two[None], ten, per_sample_weights=two[None]),
                r"input's shape \(1, 2\)": lambda: bag(two[None], ten, mode="sum", per_sample_weights=two),
            },
        }
    )
