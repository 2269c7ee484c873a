"""What a sampler is, and what it takes to go on with the next index after a job was killed.

A pass is one walk through an order of indices. Its position is what the order follows from (a seed, an epoch) and a
cursor in it: a few JSON values, from which another process goes on without anything that was drawn before.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from ddp.errors import StateDictError

T_co = TypeVar("T_co", covariant=True)
State = dict[str, Any]  # of JSON values
Order = np.ndarray[Any, Any]  # of int64

_AT_ONCE = (
    4096  # indices made Python integers together: those of a whole epoch would take four times the order's memory
)


class Sampler(Generic[T_co]):
    """Indices of a dataset in the order in which they are to be read: a subclass has `__iter__()`.

    It is resumed at its position if it also has `state_dict()`, `load_state_dict(state)`, and `state_after(state, n)`:
    the state n indices after another of the same pass. Otherwise it is read again, and what was consumed is skipped.
    """

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError(f"{type(self).__name__} has no __iter__()")


def has_position(sampler: Any) -> bool:
    """True for a sampler that is resumed at its position."""
    return all(hasattr(sampler, name) for name in ("state_dict", "load_state_dict", "state_after"))


def check_count(sampler: Any, state: Mapping[str, Any], name: str, most: int) -> int:
    """A count from 0 to `most` out of a state. Raises: StateDictError if it is none."""
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise StateDictError(f"{type(sampler).__name__}: the state has {name} {value!r}, expected 0 to {most}")
    return value


class PositionedSampler(Sampler[int]):
    """A sampler that knows where it is. Every `iter` begins one pass; after `load_state_dict`, where that state was.

    A pass that is left early is not gone on with: the next `iter` begins anew, unless a state is loaded first.
    """

    def __init__(self) -> None:
        self._loaded: State | None = None  # where the next pass begins, if somebody has said so
        self._began: State = {}  # where the pass last begun has begun
        self._read: tuple[int, Iterator[int]] = 0, iter(())  # indices up to the end of the chunk, and what it has left
        self._pass: object | None = None  # the one under way: an abandoned one must not move the position

    def __iter__(self) -> Iterator[int]:
        began, self._loaded = self._loaded, None
        self._began = self._next(draw=True) if began is None else began
        self._read = 0, iter(())
        self._pass = this = object()
        return itertools.chain.from_iterable(self._chunks(this, self._began))

    def _chunks(self, this: object, began: State) -> Iterator[Iterator[int]]:
        end = 0
        for part in self._indices(began):
            for start in range(0, len(part), _AT_ONCE):
                indices = part[start : start + _AT_ONCE].tolist()
                end += len(indices)
                chunk = iter(indices)
                if self._pass is this:
                    self._read = end, chunk
                yield chunk
        if self._pass is this:
            self._pass = None
            self._end(began)

    def state_dict(self) -> State:
        """The position, as JSON values: after the indices that the pass under way has yielded, or before the next one.

        Who reads ahead of what is consumed takes this right after `iter(sampler)`, and counts on with `state_after`.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        if self._pass is None:
            return self._next(draw=False)
        end, chunk = self._read
        return self.state_after(self._began, end - operator.length_hint(chunk))

    def state_after(self, state: State, indices: int) -> State:
        """The position so many indices after `state` in the same pass; more than it has left is its end."""
        return {**state, "cursor": min(state["cursor"] + indices * self._stride(), self._span())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next `iter` goes on at this position. Raises: StateDictError for one of another dataset or sampler."""
        for name, own in self._fixed().items():
            if state_dict.get(name) != own:
                raise StateDictError(
                    f"{type(self).__name__}: the state has {name} {state_dict.get(name)!r}, this sampler {own!r}"
                )
        check_count(self, state_dict, "cursor", self._span())
        self._loaded = {name: state_dict[name] for name in self._next(draw=False)}
        self._pass = None

    def _fixed(self) -> State:
        """What a state must share with this sampler to be one of it."""
        raise NotImplementedError

    def _next(self, draw: bool) -> State:
        """Where a new pass begins. draw: it begins now, so draw what it needs."""
        raise NotImplementedError

    def _indices(self, began: State) -> Iterable[Order]:
        """What is yielded from this position to the end of the pass, in parts: int64, 1-d."""
        raise NotImplementedError

    def _span(self) -> int:
        """The cursor at the end of a pass."""
        raise NotImplementedError

    def _stride(self) -> int:
        """How far the cursor goes for each index."""
        return 1

    def _end(self, began: State) -> None:
        """The pass that began here is over."""
