"""Datasets and what is made of them, with PyTorch's as the oracle where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddp
from ddp.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from ddp.data.datasets import split_lengths
from ddp.errors import ArgumentError, RangeError, ShapeError


class Squares(Dataset[int]):
    """Counts how it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[Any] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index * index

    def __len__(self) -> int:
        return self.length


class ManySquares(Squares):
    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        self.asked.append(list(indices))
        return [index * index for index in indices]


class Numbers(IterableDataset[int]):
    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def test_tensor_dataset() -> None:
    x = ddp.arange(6).reshape(3, 2)
    y = np.array([5, 6, 7])
    data = TensorDataset(x, y)
    assert len(data) == 3
    first, second = data[1]
    assert first.tolist() == [2, 3]
    assert second == 6
    assert data.tensors == (x, y)


def test_concat_dataset() -> None:
    data = Squares(2) + Squares(0) + Squares(3)
    assert isinstance(data, ConcatDataset)
    assert [data[i] for i in range(-5, 5)] == [0, 1, 0, 1, 4] * 2
    assert len(data) == 5
    assert data.cumulative_sizes == [2, 5]
    for index in (5, -6):
        with pytest.raises(RangeError, match=f"index {index} of 5 samples"):
            data[index]
    with pytest.raises(TypeError, match="'float' object"):
        data[0.5]


def test_chain_dataset() -> None:
    data = Numbers(1, 2) + Numbers() + Numbers(3)
    assert isinstance(data, ChainDataset)
    assert list(data) == list(data) == [1, 2, 3]
    assert len(data) == 3


def test_subset_asks_for_a_batch_at_once_where_it_can() -> None:
    for data in (Squares(9), ManySquares(9)):
        part = Subset(Subset(data, [1, 3, 5, 7]), [0, 2, 3])
        assert len(part) == 3
        assert [part[i] for i in range(3)] == [1, 25, 49]
        data.asked.clear()
        assert part.__getitems__([2, 0]) == [49, 1]
        assert data.asked == ([[7, 1]] if isinstance(data, ManySquares) else [7, 1])


def test_subset_of_an_array_takes_a_list() -> None:
    part = Subset(np.arange(10) ** 2, np.array([3, 5, 7]))  # type: ignore[arg-type]  # as above
    assert part[[0, 2]].tolist() == [9, 49]
    assert part[1:].tolist() == [25, 49]


def test_stack_dataset() -> None:
    data = StackDataset(Squares(3), ManySquares(3))
    assert len(data) == 3
    assert data[2] == (4, 4)
    assert data.__getitems__([2, 0]) == [(4, 4), (0, 0)]
    named = StackDataset(a=Squares(3), b=ManySquares(3))
    assert named[2] == {"a": 4, "b": 4}
    assert named.__getitems__([2, 0]) == [{"a": 4, "b": 4}, {"a": 0, "b": 0}]


@pytest.mark.parametrize(
    ("length", "parts", "expected"),
    [
        (10, [0.5, 0.25, 0.25], [6, 2, 2]),
        (10, [3, 7], [3, 7]),
        (1, [1], [1]),
        (0, [0.5, 0.5], [0, 0]),
        (11, [1 / 3] * 3, [4, 4, 3]),
        (5, [0.7, 0.2, 0.1 + 1e-15], [4, 1, 0]),
    ],
)
def test_split_lengths(length: int, parts: Any, expected: list[int]) -> None:
    assert split_lengths(length, parts) == expected


@pytest.mark.filterwarnings("ignore:Length of split")
@given(length=st.integers(0, 200), parts=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_random_split_gives_every_sample_to_one_part_and_pytorchs_lengths(length: int, parts: list[int]) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    fractions = [part / sum(parts) for part in parts]
    subsets = random_split(Squares(length), fractions, generator=ddp.Generator())
    results = [index for subset in subsets for index in subset.indices]
    assert sorted(results) == list(range(length))
    if sum(fractions) <= 1:  # it takes those for lengths that rounding has brought above 1
        assert list(map(len, subsets)) == list(map(len, torch_data.random_split(range(length), fractions)))


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: TensorDataset(), ArgumentError, "at least one tensor"),
        (lambda: TensorDataset([1, 2]), ArgumentError, "tensors or arrays, got a list"),
        (lambda: TensorDataset(np.ones(3), np.ones((4, 2))), ShapeError, r"\[\(3,\), \(4, 2\)\]"),
        (lambda: ConcatDataset([Numbers(1)]), ArgumentError, "ChainDataset chains those"),
        (lambda: ChainDataset([Squares(1)]), ArgumentError, "got a Squares"),
        (lambda: StackDataset(), ArgumentError, "either in order or by name"),
        (lambda: StackDataset(Squares(1), Squares(2)), ArgumentError, r"lengths \[1, 2\]"),
        (lambda: random_split(Squares(9), [4, 4]), ArgumentError, "the 9 samples.*got .4, 4., together 8"),
        (lambda: random_split(Squares(9), [0.5, 0.4]), ArgumentError, "fractions that add up to 1"),
        (lambda: Dataset()[0], NotImplementedError, "Dataset has no __getitem__"),
    ],
)
def test_misuse(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()
