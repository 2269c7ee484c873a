"""Samplers: which indices a pass reads, and in what order.

A sampler of indices can be resumed at any index, and a BatchSampler after any of its lists, if its sampler can be
resumed. With micro-batches, both can be resumed only between steps.

A pass is one walk through an order of indices. Its position is a few JSON values: what determines the order (a seed, an
epoch), and a cursor in it. From these another process can continue without the indices that were drawn before. A random
pass draws one seed when it begins, and its whole order follows from that seed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ddp._device import CPU, BaseGenerator, generator
from ddp._tensor.dtypes import is_count
from ddp.errors import ArgumentError, StateDictError

T_co = TypeVar("T_co", covariant=True)
State = dict[str, Any]  # of JSON values
Order = np.ndarray[Any, Any]  # of int64

# Number of indices converted to Python integers at once. As Python integers, a whole order takes five times the memory.
_AT_ONCE = 4096
_PART = 1 << 16  # number of indices drawn at once: a pass may have more than fit into memory


class Sampler(Generic[T_co]):
    """Indices of a dataset in the order in which they are to be read: a subclass has `__iter__()`.

    A loader resumes a sampler at its position if the sampler has `state_dict()`, `load_state_dict(state)`, and
    `state_after(state, n)`, the state n indices after `state` in the same pass. Otherwise the loader reads it from the
    beginning, and skips what was consumed.
    """

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError(f"{type(self).__name__} has no __iter__()")


def has_position(sampler: Any) -> bool:
    """Whether a sampler can be resumed at a position. A BatchSampler can if the sampler that it reads can."""
    if isinstance(sampler, BatchSampler):
        return has_position(sampler.sampler)
    return all(hasattr(sampler, name) for name in ("state_dict", "load_state_dict", "state_after"))


def check_mapping(owner: Any, state: Any) -> None:
    """Raises: StateDictError if the state is not a mapping."""
    if not isinstance(state, Mapping):
        raise StateDictError(f"{type(owner).__name__}: expected the dict of state_dict(), got {state!r:.80}")


def read_count(sampler: Any, state: Mapping[str, Any], name: str, most: int) -> int:
    """Returns the value `name` of a state. Raises: StateDictError if it is not an int from 0 to `most`."""
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise StateDictError(f"{type(sampler).__name__}: the state has {name} {value!r}, expected 0 to {most}")
    return value


class IndexSampler(Sampler[int]):
    """A sampler of indices that has a position: a cursor in an order.

    Every `iter` begins a pass. The first one after `load_state_dict` begins at the position of that state. A pass that
    is left early is not continued: the next `iter` begins anew, unless a state is loaded first.
    """

    _stride = 1  # how far each index advances the cursor

    def __init__(self) -> None:
        self._loaded: State | None = None  # where the next pass begins, if a state was loaded
        self._began: State = {}  # where the last pass began
        self._cursor: int | None = None  # the position after `_chunk` in the last pass; None if it has ended
        self._chunk: Iterator[int] = iter(())  # the indices before `_cursor` that are still to be yielded

    def __iter__(self) -> Iterator[int]:
        self._begin()
        # A generator that yields single indices would double the time of a pass.
        return itertools.chain.from_iterable(self._chunks(self._began))

    def _begin(self) -> State:
        """Begins a pass; returns its first position."""
        self._began = self._loaded or self._next(draw=True)
        self._loaded = None
        self._cursor = self._began["cursor"]
        self._chunk = iter(())
        return self._began

    def _chunks(self, began: State) -> Iterator[Iterator[int]]:
        """Yields the indices of a pass, as Python integers, and sets the sampler's position.

        If a newer pass has begun meanwhile, only the newer pass sets the position.
        """
        cursor = began["cursor"]
        for part in self._indices(began):
            for start in range(0, len(part), _AT_ONCE):
                indices = part[start : start + _AT_ONCE].tolist()
                chunk = iter(indices)
                cursor = cursor + len(indices) * self._stride
                if self._began is began:
                    self._cursor = cursor
                    self._chunk = chunk
                yield chunk
        if self._began is began:
            self._cursor = None
            self._end(began)

    def state_dict(self) -> State:
        """The position, as JSON values: after what the pass under way has yielded, or before the next pass.

        A reader that reads ahead calls this right after `iter(sampler)`, and computes later positions by `state_after`.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        if self._cursor is None:
            return self._next(draw=False)
        return self.state_after({**self._began, "cursor": self._cursor}, -operator.length_hint(self._chunk))

    def state_after(self, state: State, count: int) -> State:
        """The position `count` indices after `state` in the same pass, at most the end of the pass."""
        return {**state, "cursor": min(state["cursor"] + count * self._stride, self._span())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter` continue from this state.

        Raises: StateDictError for the state of another dataset or sampler.
        """
        check_mapping(self, state_dict)
        for name, own in self._fixed().items():
            if state_dict.get(name) != own:
                raise StateDictError(
                    f"{type(self).__name__}: the state has {name} {state_dict.get(name)!r}, this sampler {own!r}"
                )
        read_count(self, state_dict, "cursor", self._span())
        self._loaded = {name: state_dict[name] for name in self._next(draw=False)}
        self._began = {}
        self._cursor = None

    def _next(self, draw: bool) -> State:
        """The position at which a new pass begins. draw: whether it begins now, so that its seed is drawn"""
        return {"cursor": 0, **self._fixed()}

    def _fixed(self) -> State:
        """The values that a state must have in common with this sampler, by name, so that it can be loaded."""
        return {"length": self._span()}

    def _indices(self, began: State) -> Iterable[Order]:
        """The indices from position `began` to the end of the pass, in parts: int64, 1-d."""
        raise NotImplementedError

    def _span(self) -> int:
        """The cursor at the end of a pass."""
        return len(self)  # type: ignore[arg-type]  # which every subclass has

    def _end(self, began: State) -> None:
        """Called at the end of the pass that began at `began`."""


class SequentialSampler(IndexSampler):
    """The indices 0, 1, 2 and so on."""

    def __init__(self, data_source: Any) -> None:
        super().__init__()
        self.data_source = data_source

    def __len__(self) -> int:
        return len(self.data_source)

    def _indices(self, began: State) -> Iterator[Order]:
        for start in range(began["cursor"], len(self), _PART):
            yield np.arange(start, min(start + _PART, len(self)))


class _Drawn(IndexSampler):
    """A sampler whose pass follows from a seed that it draws when the pass begins.

    Raises: DeviceError for a generator of a GPU.
    """

    def __init__(self, source: BaseGenerator | None) -> None:
        super().__init__()
        if source is not None:
            generator(CPU, source)  # raises for a generator of a GPU
        self.generator = source

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        """The whole order of a pass, in parts."""
        raise NotImplementedError

    def _next(self, draw: bool) -> State:
        seed = int(generator(CPU, self.generator).integers(2**63)) if draw else None
        return {"seed": seed, "cursor": 0, **self._fixed()}

    def _indices(self, began: State) -> Iterator[Order]:
        before = began["cursor"]
        for part in self._order(np.random.default_rng(began["seed"])):
            if before < len(part):
                yield part[before:]
            before = max(0, before - len(part))

    def state_dict(self) -> State:
        """The position: the seed of the pass, how much of it was yielded, and the state of `generator`, if given."""
        state = super().state_dict()
        return state if self.generator is None else {**state, "generator": self.generator.snapshot().hex()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter` continue from this state, and sets `generator`, if given, to its saved state.

        Raises: StateDictError for the state of another dataset or sampler.
        """
        check_mapping(self, state_dict)
        seed = state_dict.get("seed")
        snapshot = state_dict.get("generator")
        if seed is not None:
            read_count(self, state_dict, "seed", 2**63 - 1)
        if (snapshot is None) != (self.generator is None):
            which = "no state of its generator" if snapshot is None else "one of a generator, and this sampler none"
            raise StateDictError(f"{type(self).__name__}: the state has {which}")
        if self.generator is not None:
            try:
                BaseGenerator().restore(bytes.fromhex(state_dict["generator"]))
            except (TypeError, ValueError):
                raise StateDictError(
                    f"{type(self).__name__}: the state has generator {snapshot!r:.60}, expected a generator's state"
                ) from None
        super().load_state_dict({"seed": None, **state_dict})
        if seed is None:
            self._loaded = None  # saved between two passes: the next pass draws a seed
        if self.generator is not None:
            self.generator.restore(bytes.fromhex(state_dict["generator"]))


def _sizes(wanted: int) -> Iterator[int]:
    """The sizes of draws that together give the same `wanted` indices as a single draw."""
    return (min(_PART, wanted - start) for start in range(0, wanted, _PART))


def _asked(num_samples: Any) -> int:
    if not is_count(num_samples):
        raise ArgumentError(f"num_samples should be a count of at least 0, is {num_samples!r}")
    return int(num_samples)


class RandomSampler(_Drawn):
    """Indices in random order.

    data_source: a dataset with a length
    replacement: draw each index from all of them, so that some may come several times and others not at all
    num_samples: of a pass; None: as many as the dataset has. A larger number without replacement: several permutations
    of the dataset, one after the other
    generator: draws the seed of a pass; None: this thread's generator, which `ddp.manual_seed` seeds

    Raises: ArgumentError if num_samples is not a count, or above 0 for an empty dataset; DeviceError for a
    generator of a GPU.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: BaseGenerator | None = None,
    ) -> None:
        super().__init__(generator)
        self.data_source = data_source
        self.replacement = bool(replacement)
        self._num_samples = None if num_samples is None else _asked(num_samples)
        if self.num_samples and not len(data_source):
            raise ArgumentError(f"RandomSampler: {num_samples} samples of an empty dataset")

    @property
    def num_samples(self) -> int:
        """The number of indices of a pass."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def _fixed(self) -> State:
        length = len(self.data_source)
        return {"length": length, "num_samples": self.num_samples, "replacement": self.replacement}

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        length = len(self.data_source)
        wanted = self.num_samples
        if self.replacement:
            return (rng.integers(length, size=size) for size in _sizes(wanted))
        return (rng.permutation(length)[: wanted - start] for start in range(0, wanted, length or 1))


class SubsetRandomSampler(_Drawn):
    """The given indices in random order.

    indices: (N) integers
    generator: draws the seed of a pass; None: this thread's generator

    Raises: DeviceError for a generator of a GPU.
    """

    def __init__(self, indices: Sequence[int], generator: BaseGenerator | None = None) -> None:
        super().__init__(generator)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        yield np.asarray(self.indices, np.int64)[rng.permutation(len(self))]


class WeightedRandomSampler(_Drawn):
    """Indices drawn with probabilities in proportion to the weights.

    weights: (N) numbers of at least 0, not all of them 0
    num_samples: the length of a pass
    replacement: an index may be drawn again; False: each index is drawn at most once
    generator: draws the seed of a pass; None: this thread's generator

    Raises: ArgumentError for an invalid num_samples or invalid weights, and without replacement if fewer weights than
    num_samples are above 0; DeviceError for a generator of a GPU.
    """

    def __init__(
        self, weights: Any, num_samples: int, replacement: bool = True, generator: BaseGenerator | None = None
    ) -> None:
        super().__init__(generator)
        self.num_samples = _asked(num_samples)
        self.replacement = bool(replacement)
        self.weights = np.array(weights, np.float64)
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ArgumentError("WeightedRandomSampler: expected weights of shape (N), each a number of at least 0")
        positive = np.count_nonzero(self.weights)
        if positive < (min(1, self.num_samples) if self.replacement else self.num_samples):
            raise ArgumentError(
                f"WeightedRandomSampler: {self.num_samples} samples, but {positive} of {len(self.weights)} weights"
                " are above 0"
            )

    def __len__(self) -> int:
        return self.num_samples

    def _fixed(self) -> State:
        return {"length": len(self.weights), "num_samples": self.num_samples, "replacement": self.replacement}

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        if self.num_samples:
            probabilities = self.weights / self.weights.sum()
            for size in _sizes(self.num_samples) if self.replacement else [self.num_samples]:
                yield rng.choice(len(probabilities), size, replace=self.replacement, p=probabilities)


class BatchSampler(Sampler[list[int]]):
    """Lists of `batch_size` indices of a sampler, in the sampler's order.

    sampler: a Sampler, or any iterable of indices
    drop_last: leave out the last list if it is shorter

    Its position is the sampler's, if the sampler has one. A last list that is shorter exhausts the sampler, so the
    position after this list is the beginning of the next pass.

    If the sampler is a DistributedSampler, all ranks make the same number of lists. With tail="exact", a rank that has
    run out of samples makes empty lists, and `len()` counts them. With micro_batches, all ranks make lists for the same
    number of steps instead: each list is a micro-batch, and this rank's lists of a step follow each other.

    Raises: ArgumentError if batch_size is not a number above 0.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        if not is_count(batch_size, 1):
            raise ArgumentError(f"batch_size should be a number above 0, is {batch_size!r}")
        self.sampler: Any = sampler
        self.batch_size = int(batch_size)
        self.drop_last = bool(drop_last)
        self._is_distributed = hasattr(sampler, "most_after")  # a method of DistributedSampler
        self._lists_per_step = len(getattr(sampler, "micro_batches_of_rank", None) or ()) or 1  # of this rank

    def __len__(self) -> int:
        if getattr(self.sampler, "micro_batches_of_rank", None) is not None:
            return self._lists_per_step * self._lists(self.sampler.most_after({"cursor": 0}))
        return self._lists(self.sampler.num_samples if self._is_distributed else len(self.sampler))

    def _lists(self, indices: int) -> int:
        return indices // self.batch_size if self.drop_last else -(-indices // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        if getattr(self.sampler, "micro_batches_of_rank", None) is not None:
            lists: Iterator[list[int]] = self.sampler.lists(self.batch_size, self.drop_last)
            return lists
        indices = iter(self.sampler)  # begins the pass, before its position is read
        return self._batches(
            indices, self._lists(self.sampler.most_after(self.sampler.state_dict())) if self._is_distributed else 0
        )

    def _batches(self, indices: Iterator[int], least: int) -> Iterator[list[int]]:
        for batch_count in itertools.count(1):
            batch = list(itertools.islice(indices, self.batch_size))
            if not batch or (self.drop_last and len(batch) < self.batch_size):
                if batch_count > least:
                    return
                batch = []
            yield batch

    def state_dict(self) -> State:
        """The position, as JSON values: after the lists that the pass under way has yielded, or before the next pass.

        Raises: StateDictError if the sampler has no position.
        """
        self._require("state_dict")
        return {"sampler": self.sampler.state_dict()}

    def state_after(self, state: State, count: int) -> State:
        """The position `count` lists after `state` in the same pass. With micro_batches, only whole steps count."""
        indices = count // self._lists_per_step * self._lists_per_step * self.batch_size  # of whole steps
        return {"sampler": self.sampler.state_after(state["sampler"], indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter` continue at this position.

        Raises: StateDictError if it is of another sampler, or if this sampler has no position.
        """
        self._require("load_state_dict")
        inner = state_dict.get("sampler") if isinstance(state_dict, Mapping) else None
        if not isinstance(inner, Mapping):
            raise StateDictError(f"BatchSampler: expected the state of a sampler, got {state_dict!r}")
        self.sampler.load_state_dict(inner)

    def _require(self, method: str) -> None:
        if not hasattr(self.sampler, method):
            raise StateDictError(f"BatchSampler: its sampler, a {type(self.sampler).__name__}, has no {method}()")
