"""Datasets: those with an index, those that are iterated, and combinations of datasets."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ddp import _device
from ddp._device import CPU, BaseGenerator
from ddp.errors import ArgumentError, RangeError, ShapeError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(Generic[T_co]):
    """Samples by index: a subclass has `__getitem__(index)` and `__len__()`.

    A subclass may also have `__getitems__(indices) -> list of samples`, which the loader then calls once a batch.
    `a + b` has the samples of `a`, then those of `b`.
    """

    def __getitem__(self, index: Any) -> T_co:
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__(index)")

    def __add__(self, other: Dataset[T_co]) -> ConcatDataset[T_co]:
        return ConcatDataset([self, other])


class IterableDataset(Dataset[T_co]):
    """Samples in the order in which they come, as from a stream: a subclass has `__iter__()`.

    Every rank and every worker process iterates its own copy, so `__iter__` must give each of them its part. A
    dataset with `state_dict()` and `load_state_dict(state)` is resumed with these. `a + b` has the samples of `a`, then
    those of `b`.
    """

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError(f"{type(self).__name__} has no __iter__()")

    def __add__(self, other: Dataset[T_co]) -> ChainDataset[T_co]:  # type: ignore[override]  # as in PyTorch
        return ChainDataset([self, other])


class TensorDataset(Dataset[tuple[Any, ...]]):
    """Sample i is `tuple(t[i] for t in tensors)`.

    tensors: (N, ...) each, with the same N; tensors, NumPy arrays, or other objects with `shape` that can be indexed
    Raises: ArgumentError without tensors, or if one has no `shape`; ShapeError if their N differs or one is 0-d.
    """

    def __init__(self, *tensors: Any) -> None:
        if not tensors:
            raise ArgumentError("TensorDataset: expected at least one tensor")
        for tensor in tensors:
            if not hasattr(tensor, "shape"):
                raise ArgumentError(f"TensorDataset: expected tensors or arrays, got a {type(tensor).__name__}")
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ShapeError(f"TensorDataset: expected tensors of one length in dimension 0, got shapes {shapes}")
        self.tensors = tensors

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])


def fetch_samples(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """The samples at `indices`, by one call of `__getitems__` if the dataset has it.

    Raises: ArgumentError if `__getitems__` returns another number of samples.
    """
    get_samples = getattr(dataset, "__getitems__", None)
    if get_samples is None:
        return [dataset[index] for index in indices]
    samples: list[Any] = get_samples(indices)
    if len(samples) != len(indices):
        raise ArgumentError(
            f"{type(dataset).__name__}.__getitems__: asked for {len(indices)} samples, it returned {len(samples)}"
        )
    return samples


class StackDataset(Dataset[Any]):
    """Sample i is sample i of every dataset: in a tuple, or in a dict if the datasets have names.

    `StackDataset(images, texts)`, or `StackDataset(image=images, text=texts)`.
    Raises: ArgumentError if there are datasets with and without a name, or none at all, or their lengths differ.
    """

    datasets: tuple[Any, ...] | dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if bool(args) == bool(kwargs):
            raise ArgumentError("StackDataset: expected datasets either in order or by name")
        self.datasets = kwargs or args
        lengths = [len(dataset) for dataset in self._each()]
        if len(set(lengths)) > 1:
            raise ArgumentError(f"StackDataset: expected datasets of one length, got lengths {lengths}")
        self._length = lengths[0]

    def _each(self) -> Iterable[Any]:
        return self.datasets.values() if isinstance(self.datasets, dict) else self.datasets

    def _sample(self, parts: Sequence[Any]) -> Any:
        return dict(zip(self.datasets, parts, strict=True)) if isinstance(self.datasets, dict) else tuple(parts)

    def __getitem__(self, index: Any) -> Any:
        return self._sample([dataset[index] for dataset in self._each()])

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        if type(self).__getitem__ is not StackDataset.__getitem__:
            return [self[index] for index in indices]  # a subclass defines what a sample is
        columns = [fetch_samples(dataset, indices) for dataset in self._each()]
        return [self._sample(parts) for parts in zip(*columns, strict=True)]

    def __len__(self) -> int:
        return self._length


class ConcatDataset(Dataset[T_co]):
    """The samples of several datasets, one dataset after the other.

    Raises: ArgumentError if there are no datasets, or if one is an IterableDataset.
    """

    def __init__(self, datasets: Iterable[Dataset[T_co]]) -> None:
        self.datasets: list[Any] = list(datasets)
        if not self.datasets:
            raise ArgumentError("ConcatDataset: expected at least one dataset")
        for dataset in self.datasets:
            if isinstance(dataset, IterableDataset):
                raise ArgumentError("ConcatDataset: an IterableDataset has no index; ChainDataset chains those")
        self.cumulative_sizes = list(itertools.accumulate(map(len, self.datasets)))

    def __getitem__(self, index: Any) -> T_co:
        index = operator.index(index)
        length = len(self)
        if not -length <= index < length:
            raise RangeError(f"ConcatDataset: index {index} of {length} samples")
        index %= length
        which = bisect.bisect_right(self.cumulative_sizes, index)
        sample: T_co = self.datasets[which][index - (self.cumulative_sizes[which - 1] if which else 0)]
        return sample

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]


class ChainDataset(IterableDataset[T_co]):
    """The samples of several IterableDatasets, one after the other. Raises: ArgumentError for any other dataset."""

    def __init__(self, datasets: Iterable[Dataset[T_co]]) -> None:
        self.datasets: list[Any] = list(datasets)
        for dataset in self.datasets:
            if not isinstance(dataset, IterableDataset):
                raise ArgumentError(f"ChainDataset: expected IterableDatasets, got a {type(dataset).__name__}")

    def __iter__(self) -> Iterator[T_co]:
        for dataset in self.datasets:
            yield from dataset

    def __len__(self) -> int:
        return sum(map(len, self.datasets))


class Subset(Dataset[T_co]):
    """Some samples of a dataset: sample i is `dataset[indices[i]]`.

    `subset[[0, 2]]` is `dataset[[indices[0], indices[2]]]`.

    indices: a sequence of the dataset's indices, in any order
    """

    def __init__(self, dataset: Dataset[T_co], indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __getitem__(self, index: Any) -> T_co:
        return self.dataset[[self.indices[i] for i in index] if isinstance(index, list) else self.indices[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        if type(self).__getitem__ is not Subset.__getitem__:
            return [self[index] for index in indices]  # a subclass defines what a sample is
        return fetch_samples(self.dataset, [self.indices[index] for index in indices])

    def __len__(self) -> int:
        return len(self.indices)


def split_lengths(length: int, parts: Sequence[float]) -> list[int]:
    """Computes the lengths of parts of `length` samples. parts: lengths; or fractions, if they add up to 1

    Lengths from fractions are rounded down, and the samples left over go to the first parts, one each:
    `split_lengths(10, [0.5, 0.25, 0.25]) == [6, 2, 2]`

    Raises: ArgumentError if lengths are not counts that add up to `length`, or fractions are not within [0, 1].
    """
    if math.isclose(sum(parts), 1):
        if not all(0 <= part <= 1 for part in parts):
            raise ArgumentError(f"random_split: expected fractions from 0 to 1, got {list(parts)}")
        lengths = [math.floor(length * part) for part in parts]
        for index in range(length - sum(lengths)):
            lengths[index % len(lengths)] += 1
        return lengths
    if not all(isinstance(part, (int, np.integer)) and part >= 0 for part in parts) or sum(parts) != length:
        raise ArgumentError(
            f"random_split: expected lengths that add up to the {length} samples, or fractions that add up to 1,"
            f" got {list(parts)}, together {sum(parts)}"
        )
    return [int(part) for part in parts]


def random_split(
    dataset: Dataset[T], lengths: Sequence[float], generator: BaseGenerator | None = None
) -> list[Subset[T]]:
    """Splits a dataset at random into subsets, so that each sample is in exactly one of them.

    lengths: of the subsets; or fractions that add up to 1: the resulting lengths are rounded down, and the samples left
    over go to the first subsets, one each
    generator: draws the order; None: this thread's generator. All ranks must draw the same order, so give them
    generators of the same seed: `generator=ddp.Generator().manual_seed(0)`

    Raises: ArgumentError if lengths are not counts that add up to the number of samples, or fractions are not within
    [0, 1]; DeviceError for a generator of a GPU.
    """
    sizes = split_lengths(len(dataset), lengths)  # type: ignore[arg-type]  # Dataset leaves __len__ to subclasses
    order = _device.generator(CPU, generator).permutation(sum(sizes)).tolist()
    ends = itertools.accumulate(sizes)
    return [Subset(dataset, order[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
