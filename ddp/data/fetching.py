"""Makes a batch from indices, in a worker process or in the training process, with random numbers of its own.

Each batch has a seed. While it is fetched, this package's generators start from that seed, so the random numbers are
the same whichever process fetches the batch, and when. The training process's own generators are not affected.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddp import _device
from ddp._device import CPU
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import SUPPORTED
from ddp.data.collate import Out, default_collate, map_batch
from ddp.data.datasets import Subset, TensorDataset, fetch_samples
from ddp.errors import RangeError

Array = np.ndarray[Any, Any]

_MASK = 2**64 - 1


def mix_seed(*numbers: int) -> int:
    """A seed of 63 bits from several integers: similar integers give unrelated seeds.

    Source: the finalizer of SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@contextmanager
def restored_generators() -> Iterator[None]:
    """A context in which this thread has new generators of this package, of seed 0. At its end, the old ones return."""
    own = _device.exchange_generators((0, {}))
    try:
        yield
    finally:
        _device.exchange_generators(own)


def seed_package(seed: int) -> None:
    """Replaces this thread's generators of this package by new ones of this seed."""
    _device.exchange_generators((seed, {}))


def seed_everything(seed: int) -> None:
    """Seeds what a worker draws from: this package's generators, NumPy's global one and Python's."""
    seed_package(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@dataclass(frozen=True)
class WorkerInfo:
    """Describes a worker process. id: 0 to num_workers - 1; seed: of the worker in this pass; dataset: its copy."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


_worker_info: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Describes the worker that this process is: `id`, `num_workers`, `seed` and `dataset`. None outside of workers."""
    return _worker_info


def set_worker_info(info: WorkerInfo) -> None:
    """Sets what `get_worker_info` returns."""
    global _worker_info
    _worker_info = info


class FetchConfig(NamedTuple):
    """The dataset, and how batches are made of it.

    collate, initialize: the loader's collate_fn and worker_init_fn; stream: whether the dataset has no index
    size: samples per batch; None: the samples are not batched
    """

    dataset: Any
    collate: Any
    initialize: Any
    stream: bool
    size: int | None
    drop_last: bool


class StartPass(NamedTuple):
    """The message that begins a pass. seed: of the worker

    state: of a stream's dataset, to continue from; None: from the beginning
    skipped: seeds of the batches to read and discard first, if the dataset of a stream has no state
    """

    seed: int
    state: Any
    skipped: Sequence[int]


class WorkerFailure(NamedTuple):
    """Describes an exception in a worker process. The consumer may be unable to unpickle the exception itself.

    message: where it was raised, with the worker's traceback
    pickled_class: the pickle of its class; empty if it cannot be pickled
    attributes: the pickle of each attribute that can be pickled
    """

    message: str
    pickled_class: bytes
    attributes: dict[str, bytes]


class FetchResult(NamedTuple):
    """The result of a task. end: the stream had no more batches; last: this batch is known to be the last one

    state: of a stream's dataset after this batch, if it has `state_dict`; failure: why a worker process has no batch
    """

    batch: Any
    state: Any = None
    last: bool = False
    end: bool = False
    failure: WorkerFailure | None = None


class BatchMaker:
    """Makes the batches of passes over a dataset.

    seeding: called before each pass and before each batch, with its seed
    out: allocates a batch's arrays for `default_collate`

    `position` says what is being read, for error messages: an index, all indices of the batch, or a text for a stream.
    """

    def __init__(self, config: FetchConfig, seeding: Callable[[int], None], out: Out = np.empty) -> None:
        self.position: Any = None
        self._config = config
        self._seeding = seeding
        self._out = out
        plain = config.collate is default_collate
        self._collate = functools.partial(default_collate, out=out) if plain else config.collate
        self._rows = _rows(config.dataset) if plain and config.size is not None and not config.stream else None
        self._stream: Iterator[Any] = iter(())

    def start_pass(self, start: StartPass) -> None:
        """Prepares a pass: a stream begins, or continues from its state."""
        dataset = self._config.dataset
        size = self._config.size
        self.position = None
        self._seeding(start.seed)
        if not self._config.stream:
            return
        if start.state is not None:
            dataset.load_state_dict(start.state)
        self._stream = iter(dataset)
        for seed in start.skipped:
            self._seeding(seed)
            for _ in itertools.islice(self._stream, size or 1):
                pass

    def make(self, seed: int, indices: Any) -> FetchResult:
        """Makes the batch of `indices`: a list, or one index. For a stream, makes the next batch."""
        self._seeding(seed)
        dataset, _, _, stream, size, drop_last = self._config
        self.position = "the next of the stream" if stream else indices
        if not stream:
            return FetchResult(self._collate(dataset[indices]) if size is None else self._indexed(indices))
        samples = list(itertools.islice(self._stream, size or 1))
        last = len(samples) < (size or 1)
        if not samples or (last and drop_last):
            return FetchResult(None, end=True)
        batch = self._collate(samples[0] if size is None else samples)
        return FetchResult(batch, dataset.state_dict() if hasattr(dataset, "state_dict") else None, last)

    def _indexed(self, indices: Any) -> Any:
        dataset = self._config.dataset
        if not indices:  # this rank has run out of samples
            self.position = 0
            return empty_like_batch(self._config.collate([dataset[0]]))
        if self._rows is not None:
            return self._rows(indices, self._out)
        if hasattr(dataset, "__getitems__"):
            return self._collate(fetch_samples(dataset, indices))
        samples = []
        for self.position in indices:
            samples.append(dataset[self.position])
        self.position = indices
        return self._collate(samples)


def _rows(dataset: Any) -> Callable[[Sequence[int], Out], list[Any]] | None:
    """Returns a function that takes a whole batch from each array of a TensorDataset, or of a Subset of one.

    That function returns what `default_collate` would make of the samples, and raises an IndexError for an index out of
    range. `_rows` returns None for other datasets, for a tensor that requires grad or is on a GPU, for a dtype that no
    tensor has, and for a Subset whose indices are not a list of integers.
    """
    subsets: list[Any] = []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(getattr(x, "requires_grad", False) for x in dataset.tensors):
        return None
    arrays = [x.array if isinstance(x, TensorBase) else x for x in dataset.tensors]
    if not all(isinstance(array, np.ndarray) and array.dtype in SUPPORTED for array in arrays):
        return None
    length = len(dataset)
    chosen = [np.asarray(positions) for positions in subsets]
    # Other indices, such as a mask of bool, are not supported here.
    if any(positions.dtype.kind not in "iu" or positions.ndim != 1 for positions in chosen):
        return None

    def rows(indices: Sequence[int], out: Out) -> list[Any]:
        picked = np.asarray(indices)
        for positions in chosen:
            picked = positions[picked]
        for index in (picked.min(), picked.max()):
            if not -length <= index < length:
                raise RangeError(f"index {index} of a dataset of {length} samples")
        batch = []
        for array in arrays:
            selected = out((len(picked), *array.shape[1:]), array.dtype)
            np.take(array, picked, 0, selected, "wrap")  # indices are checked above; "raise" would buffer `selected`
            batch.append(wrap(selected, CPU))
        return batch

    return rows


def empty_like_batch(batch: Any) -> Any:
    """A batch of the same structure with no samples in it: every array, unless it is 0-d, gets shape (0, ...).

    `empty_like_batch([ones(3, 2), {"word": ["a", "b", "c"]}]) == [empty(0, 2), {"word": []}]`
    """
    if isinstance(batch, Tensor | np.ndarray):
        return batch[:0] if batch.ndim else batch
    if type(batch) in (list, tuple) and all(isinstance(text, str | bytes) for text in batch):
        return type(batch)()
    return map_batch(batch, empty_like_batch)
