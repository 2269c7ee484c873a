"""Batches of indices: what a loader hands to its workers, as lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ddp.data.distributed import DistributedSampler
from ddp.data.positions import Sampler, State, check_count, has_position
from ddp.errors import ArgumentError, StateDictError


class BatchSampler(Sampler[list[int]]):
    """Lists of `batch_size` indices of a sampler, in its order.

    sampler: a Sampler, or any iterable of indices
    drop_last: leave out the last list if it is shorter

    Its position is the sampler's, read and resumed as that is. A sampler that has none is read again, and the lists
    that were consumed are skipped.

    All ranks make as many lists: one that has run out of samples, where a DistributedSampler's tail is "exact", makes
    empty ones. `len()` counts them.

    Raises: ArgumentError if batch_size is not a number above 0.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        if not isinstance(batch_size, (int, np.integer)) or isinstance(batch_size, bool) or batch_size < 1:
            raise ArgumentError(f"batch_size should be a number above 0, is {batch_size!r}")
        self.sampler: Any = sampler
        self.batch_size = int(batch_size)
        self.drop_last = bool(drop_last)
        self._positioned = has_position(sampler)
        self._shared = isinstance(sampler, DistributedSampler)
        self._skipped = 0  # lists that the next pass leaves out
        self._began: State = {}
        self._yielded = 0
        self._pass: object | None = None  # the one under way: an abandoned one must not move the position

    def __len__(self) -> int:
        return self._lists(self.sampler.num_samples if self._shared else len(self.sampler))

    def _lists(self, indices: int) -> int:
        return indices // self.batch_size if self.drop_last else -(-indices // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        self._began, skipped, self._skipped = self._now(), self._skipped, 0
        self._yielded = 0
        self._pass = this = object()
        least = self._lists(self.sampler.most_after(self._began["sampler"])) if self._shared else 0
        return self._walk(this, itertools.islice(self._batches(indices, least), skipped, None))

    def _walk(self, this: object, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            if self._pass is this:
                self._yielded += 1
            yield batch
        if self._pass is this:
            self._pass = None

    def _batches(self, indices: Iterator[int], least: int) -> Iterator[list[int]]:
        for made in itertools.count():
            batch = list(itertools.islice(indices, self.batch_size))
            if not batch or (self.drop_last and len(batch) < self.batch_size):
                if made >= least:
                    return
                batch = []
            yield batch

    def _now(self) -> State:
        return {"sampler": self.sampler.state_dict()} if self._positioned else {"batches": self._skipped}

    def state_dict(self) -> State:
        """The position, as JSON values: after the lists that the pass under way has yielded, or before the next one.

        Who reads ahead of what is consumed takes this right after `iter(sampler)`, and counts on with `state_after`.
        """
        return self._now() if self._pass is None else self.state_after(self._began, self._yielded)

    def state_after(self, state: State, batches: int) -> State:
        """The position so many lists after `state` in the same pass; more than it has left is its end."""
        if self._positioned:
            return {"sampler": self.sampler.state_after(state["sampler"], batches * self.batch_size)}
        return {"batches": state["batches"] + batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next `iter` goes on at this position. Raises: StateDictError for one of another sampler."""
        kind = "sampler" if self._positioned else "batches"
        if not isinstance(state_dict, Mapping) or list(state_dict) != [kind]:
            raise StateDictError(f"BatchSampler: expected a state of {kind!r} alone, got {state_dict!r}")
        if self._positioned:
            if not isinstance(state_dict[kind], Mapping):
                raise StateDictError(f"BatchSampler: expected the state of a sampler, got {state_dict[kind]!r}")
            self.sampler.load_state_dict(state_dict[kind])
        else:
            self._skipped = check_count(self, state_dict, kind, 2**63 - 1)
        self._pass = None
