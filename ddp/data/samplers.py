"""Samplers of one process: in order, at random, and by weights.

A random pass draws one seed when it begins, and its whole order follows from that seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ddp._device import CPU, Stream, generator
from ddp.data.positions import Order, PositionedSampler, State, check_count
from ddp.errors import ArgumentError, StateDictError

_PART = 1 << 16  # indices drawn together: a pass may have more than fit into memory


def _parts(wanted: int) -> Iterator[int]:
    """The sizes in which that many indices are drawn; together they are those of a single draw."""
    return (min(_PART, wanted - start) for start in range(0, wanted, _PART))


class SequentialSampler(PositionedSampler):
    """0, 1, 2 and so on."""

    def __init__(self, data_source: Any) -> None:
        super().__init__()
        self.data_source = data_source

    def __len__(self) -> int:
        return len(self.data_source)

    def _fixed(self) -> State:
        return {"length": len(self)}

    def _next(self, draw: bool) -> State:
        return {"cursor": 0, **self._fixed()}

    def _indices(self, began: State) -> Iterator[Order]:
        for start in range(began["cursor"], len(self), _PART):
            yield np.arange(start, min(start + _PART, len(self)))

    def _span(self) -> int:
        return len(self)


class _Drawn(PositionedSampler):
    """A sampler whose pass follows from a seed that it draws when the pass begins.

    Raises: DeviceError for a generator of a GPU.
    """

    def __init__(self, source: Stream | None) -> None:
        super().__init__()
        if source is not None:
            generator(CPU, source)  # raises for one of a GPU
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
        """The position: the seed of the pass, what of it has been yielded, and where a `generator` of its own is."""
        state = super().state_dict()
        return state if self.generator is None else {**state, "generator": self.generator.snapshot().hex()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next `iter` goes on at this position. Raises: StateDictError for one of another dataset or sampler."""
        seed, snapshot = state_dict.get("seed"), state_dict.get("generator")
        if seed is not None:
            check_count(self, state_dict, "seed", 2**63 - 1)
        if self.generator is None and snapshot is not None:
            raise StateDictError(
                f"{type(self).__name__}: the state is of a sampler with a generator, this one has none"
            )
        restored = b"" if self.generator is None else self._snapshot(snapshot)
        super().load_state_dict({"seed": None, **state_dict})
        if seed is None:
            self._loaded = None  # saved between two passes: the next one draws its own
        if self.generator is not None:
            self.generator.restore(restored)

    def _snapshot(self, text: Any) -> bytes:
        """That of a generator. Raises: StateDictError if it is none."""
        try:
            snapshot = bytes.fromhex(text)
            Stream().restore(snapshot)
        except (ArgumentError, TypeError, ValueError) as error:
            raise StateDictError(f"{type(self).__name__}: no state of its generator in the state: {error}") from error
        return snapshot


def _asked(num_samples: Any) -> int:
    if not isinstance(num_samples, (int, np.integer)) or isinstance(num_samples, bool) or num_samples < 0:
        raise ArgumentError(f"num_samples should be a count of at least 0, is {num_samples!r}")
    return int(num_samples)


class RandomSampler(_Drawn):
    """Indices in random order.

    data_source: a dataset with a length
    replacement: every index is drawn from all, so that some come twice and others not at all
    num_samples: of a pass; None: as many as the dataset has. Without replacement more than that are several orders,
    one after the other
    generator: where the seed of a pass is drawn; None: this thread's stream, which `ddp.manual_seed` seeds

    Raises: ArgumentError if num_samples is no count, or there is nothing to draw from.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: Stream | None = None,
    ) -> None:
        super().__init__(generator)
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = None if num_samples is None else _asked(num_samples)
        if self.num_samples and not len(data_source):
            raise ArgumentError(f"RandomSampler: {num_samples} samples of an empty dataset")

    @property
    def num_samples(self) -> int:
        """Of a pass."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def _span(self) -> int:
        return self.num_samples

    def _fixed(self) -> State:
        return {
            "length": len(self.data_source),
            "num_samples": self.num_samples,
            "replacement": bool(self.replacement),
        }

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        length, wanted = len(self.data_source), self.num_samples
        if self.replacement:
            return (rng.integers(length, size=size) for size in _parts(wanted))
        return (rng.permutation(length)[: wanted - start] for start in range(0, wanted, length or 1))


class SubsetRandomSampler(_Drawn):
    """The given indices in random order.

    indices: (N) integers
    generator: where the seed of a pass is drawn; None: this thread's stream
    """

    def __init__(self, indices: Sequence[int], generator: Stream | None = None) -> None:
        super().__init__(generator)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def _span(self) -> int:
        return len(self)

    def _fixed(self) -> State:
        return {"length": len(self)}

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        yield np.asarray(self.indices, np.int64)[rng.permutation(len(self))]


class WeightedRandomSampler(_Drawn):
    """Indices drawn with the probabilities that the weights have among each other.

    weights: (N) numbers of at least 0, not all of them 0
    num_samples: of a pass
    replacement: every index is drawn from all; False: from those that have not been drawn
    generator: where the seed of a pass is drawn; None: this thread's stream

    Raises: ArgumentError if num_samples is no count or the weights are no such numbers, or if fewer of them are above
    0 than samples are to be drawn without replacement.
    """

    def __init__(
        self, weights: Any, num_samples: int, replacement: bool = True, generator: Stream | None = None
    ) -> None:
        super().__init__(generator)
        self.num_samples = _asked(num_samples)
        self.replacement = bool(replacement)
        self.weights = np.array(weights, np.float64)
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ArgumentError("WeightedRandomSampler: expected weights of shape (N), each a number of at least 0")
        positive = int(np.count_nonzero(self.weights))
        enough = positive > 0 if self.replacement else positive >= self.num_samples
        if not enough and self.num_samples:
            raise ArgumentError(
                f"WeightedRandomSampler: {self.num_samples} samples, but {positive} of {len(self.weights)} weights"
                " are above 0"
            )

    def __len__(self) -> int:
        return self.num_samples

    def _span(self) -> int:
        return self.num_samples

    def _fixed(self) -> State:
        return {"length": len(self.weights), "num_samples": self.num_samples, "replacement": self.replacement}

    def _order(self, rng: np.random.Generator) -> Iterator[Order]:
        if not self.num_samples:
            return
        shares = self.weights / self.weights.sum()
        for size in _parts(self.num_samples) if self.replacement else [self.num_samples]:
            yield rng.choice(len(shares), size, replace=self.replacement, p=shares)
