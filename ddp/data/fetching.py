"""From indices to a batch, the same in a worker process and in the user's own, with random numbers of the batch's own.

Each batch has a seed. While it is fetched, this package's generators draw from streams that begin there, so the numbers
are the same whichever process fetches the batch, and when; the user's own generators stay where they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ddp import _device
from ddp._device import CPU
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import SUPPORTED
from ddp.data.collate import Out, default_collate, mapping_like
from ddp.data.datasets import Subset, TensorDataset
from ddp.errors import ArgumentError, RangeError

Array = np.ndarray[Any, Any]
Collate = Callable[[Any], Any]

_MASK = 2**64 - 1


def mix_seed(*numbers: int) -> int:
    """A seed of 63 bits from several integers: alike ones lead to unlike seeds.

    Source: the finalizer of SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class SeededGenerators:
    """A context in which this package's generators draw from streams that begin at `seed`."""

    __slots__ = ("_own", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: Any = None

    def __enter__(self) -> None:
        self._own = _device.exchange_generators((self._seed, {}))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _device.exchange_generators(self._own)


def seed_generators(seed: int) -> None:
    """Seeds what a worker draws from: this package's generators, NumPy's global one and Python's."""
    _device.exchange_generators((seed, {}))
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@dataclass(frozen=True)
class WorkerInfo:
    """A worker process. id: 0 to num_workers - 1; seed: of this worker, of this pass; dataset: its copy."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


_worker_info: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Which worker this process is: `id`, `num_workers`, `seed` and `dataset`; None outside of workers."""
    return _worker_info


def set_worker_info(info: WorkerInfo) -> None:
    """This process is that worker from now on."""
    global _worker_info
    _worker_info = info


class FetchConfig(NamedTuple):
    """What batches are made of, and how.

    stream: the dataset has no index; size: samples a batch, None for none
    """

    dataset: Any
    collate: Any
    initialize: Any
    stream: bool
    size: int | None
    drop_last: bool


class FetchResult(NamedTuple):
    """The result of a task. end: the stream had no more batches; last: this is known to be the last one

    state: the dataset's own, after this batch
    failure, dropped: of a worker process: a WorkerFailure, and blocks that the consumer is to forget
    """

    batch: Any
    state: Any = None
    last: bool = False
    end: bool = False
    failure: Any = None
    dropped: Sequence[str] = ()


class BatchMaker:
    """Makes the batches of passes over a dataset. out: where `default_collate` puts a batch's arrays"""

    def __init__(self, config: FetchConfig, out: Out = np.empty) -> None:
        self._config, self._out = config, out
        self._stateful = config.stream and hasattr(config.dataset, "state_dict")
        self.fetcher: Any = None

    def start_pass(self, state: Any, skipped: Sequence[int], seeded: Callable[[int], Any]) -> None:
        """Prepares a pass.

        state: of a stream's dataset, to go on from; skipped: where it has none, the seeds of batches that are left out
        seeded: a context in which generators begin at a seed
        """
        dataset, collate, _, stream, size, drop_last = self._config
        if not stream:
            self.fetcher = Fetcher(dataset, collate, size is not None, self._out)
            return
        if state is not None:
            dataset.load_state_dict(state)
        self.fetcher = StreamFetcher(dataset, collate, size, drop_last, self._out)
        try:
            for seed in skipped:
                with seeded(seed):
                    self.fetcher.skip()
        except StopIteration:
            pass  # the stream is shorter than it was: its end comes when a batch is asked for

    def make(self, indices: Any) -> FetchResult:
        """The batch of these indices; None: the next one of a stream."""
        if not self._config.stream:
            return FetchResult(self.fetcher.fetch(indices))
        try:
            batch = self.fetcher.fetch()
        except StopIteration:
            return FetchResult(None, end=True)
        return FetchResult(batch, self._config.dataset.state_dict() if self._stateful else None, self.fetcher.over)


class Fetcher:
    """Makes batches of a dataset with an index.

    batched: what is fetched is a list of indices; False: one index, and the sample goes through `collate` by itself
    out: where `default_collate` puts a batch's arrays
    """

    def __init__(self, dataset: Any, collate: Collate, batched: bool, out: Out = np.empty) -> None:
        self.at: Any = None  # the index that is being read, or all of them, which an error names
        self._dataset, self._collate, self._out = dataset, collate, out
        self._default = collate is default_collate
        self._batched = batched
        self._columns = ArrayColumns.of(dataset) if self._default and batched else None
        self._many = getattr(dataset, "__getitems__", None)

    def fetch(self, indices: Any) -> Any:
        """The batch of a list of indices, or of one index; of an empty list, a batch without samples."""
        if not self._batched:
            self.at = indices
            return self._collate(self._dataset[indices])
        if not indices:
            self.at = 0
            return empty_like_batch(self._collate([self._dataset[0]]))
        if self._columns is not None:
            self.at = indices
            return self._columns.taken(indices, self._out)
        samples = self._samples(indices)
        self.at = indices
        return default_collate(samples, out=self._out) if self._default else self._collate(samples)

    def _samples(self, indices: Sequence[Any]) -> Any:
        if self._many is not None:
            self.at = indices
            samples = self._many(indices)
            if len(samples) != len(indices):
                raise ArgumentError(
                    f"{type(self._dataset).__name__}.__getitems__: asked for {len(indices)} samples, it returned"
                    f" {len(samples)}"
                )
            return samples
        dataset, samples = self._dataset, []
        for self.at in indices:
            samples.append(dataset[self.at])
        return samples


class StreamFetcher:
    """Makes batches of a dataset without an index, in the order in which samples come.

    size: samples a batch; None: each sample goes through `collate` by itself
    """

    def __init__(self, dataset: Any, collate: Collate, size: int | None, drop_last: bool, out: Out = np.empty) -> None:
        self.at: Any = None
        self.over = False  # whether the last batch is known to have been the last one
        self._samples: Iterator[Any] = iter(dataset)
        self._collate, self._out = collate, out
        self._default = collate is default_collate
        self._size, self._drop_last = size, drop_last

    def fetch(self) -> Any:
        """The next batch. Raises: StopIteration after the last one."""
        self.at = "the next of the stream"
        if self._size is None:
            return self._collate(next(self._samples))
        samples = self.skip()
        return default_collate(samples, out=self._out) if self._default else self._collate(samples)

    def skip(self) -> list[Any]:
        """The samples of the next batch, which is not made of them. Raises: StopIteration after the last one."""
        if self._size is None:
            return [next(self._samples)]
        samples = []
        for sample in self._samples:
            samples.append(sample)
            if len(samples) == self._size:
                return samples
        self.over = True
        if not samples or self._drop_last:
            raise StopIteration
        return samples


def _within(chosen: Array | None, length: int) -> bool:
    """Whether all of `chosen` are indices of so many; where one is not, its sample is asked for, and says so."""
    return chosen is None or not len(chosen) or bool(-length <= chosen.min() and chosen.max() < length)


class ArrayColumns:
    """Arrays whose rows are samples: one call for each takes a whole batch out of it."""

    def __init__(self, arrays: list[Array], chosen: Array | None) -> None:
        self._arrays, self._chosen = arrays, chosen
        self._length = len(arrays[0] if chosen is None else chosen)

    @classmethod
    def of(cls, dataset: Any) -> ArrayColumns | None:
        """The columns of a TensorDataset, or of a Subset of one; None where samples have to be asked for one by one."""
        chosen: Array | None = None
        while type(dataset) is Subset:
            indices = np.asarray(dataset.indices)
            if indices.dtype.kind not in "iu" or indices.ndim != 1 or not _within(chosen, len(indices)):
                return None
            chosen = indices if chosen is None else indices[chosen]
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset:
            return None
        arrays = [each.array if isinstance(each, TensorBase) else each for each in dataset.tensors]
        plain = all(isinstance(each, np.ndarray) and each.dtype in SUPPORTED for each in arrays)
        wanted = any(isinstance(each, TensorBase) and each.requires_grad for each in dataset.tensors)
        return cls(arrays, chosen) if plain and not wanted and _within(chosen, len(dataset)) else None

    def taken(self, indices: Sequence[Any], out: Out) -> list[Any]:
        """The batch: what `default_collate` makes of the samples. Raises: RangeError."""
        rows = np.asarray(indices)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise RangeError(f"expected indices that are integers, got {list(indices[:3])} …")
        for index in (rows.min(), rows.max()):
            if not -self._length <= index < self._length:
                raise RangeError(f"index {index} of a dataset of {self._length} samples")
        if self._chosen is not None:
            rows = self._chosen[rows]
        batch = []
        for array in self._arrays:
            into = out((len(rows), *array.shape[1:]), array.dtype)
            np.take(array, rows, 0, into, "wrap")  # all are within: the mode "raise" would go through a buffer
            batch.append(wrap(into, CPU))
        return batch


def empty_like_batch(batch: Any) -> Any:
    """A batch of the same structure with no samples in it: every array of shape (0, ...).

    `empty_like_batch([ones(3, 2), {"word": ["a", "b", "c"]}]) == [empty(0, 2), {"word": []}]`
    """
    if isinstance(batch, Tensor | np.ndarray):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: empty_like_batch(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(empty_like_batch, batch))
    if isinstance(batch, list | tuple):
        words = all(isinstance(each, str | bytes) for each in batch)
        return type(batch)() if words else type(batch)(map(empty_like_batch, batch))
    return batch
