"""Where a loader is: after the batches that it has handed out, whatever was fetched ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ddp.data.loading._course import Course
from ddp.data.loading._passes import Streams
from ddp.errors import StateDictError

State = dict[str, Any]  # of JSON values


class Source(Protocol):
    """The batches of a pass."""

    def __next__(self) -> Any: ...

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""

    def hand_out(self) -> None:
        """The consumer has got one more of the batches that were read."""

    def state(self) -> Any:
        """Where sampler or streams are, after what was handed out; None where nobody knows."""

    def close(self) -> None:
        """There will be no more batches: ends who makes them."""


class Position:
    """Where a loader is, and the pass under way.

    order: what yields indices, None for a stream; readers: processes that read the dataset
    """

    def __init__(self, order: Any, readers: int) -> None:
        self.epoch = 0
        self.batches = 0  # handed out in this pass
        self.seed: int | None = None
        self.streams: Streams | None = None  # where the next pass over a stream goes on
        self._order, self._readers = order, readers
        self._source: Source | None = None
        self._course: Course | None = None  # of that source
        self._left: Any = None  # the source's state, when its pass was left early
        self._loaded = False

    def begins(self) -> None:
        """A pass is about to begin: where a loaded state says, else anew."""
        if self._source is not None:
            self.leave(self._source)
        if not self._loaded:
            self.batches, self.streams = 0, None
        self._loaded, self._source, self._left = False, None, None

    def follow(self, source: Source, course: Course | None) -> None:
        """This is the pass that counts now. course: None for a stream, which alone knows where it ends"""
        self._source, self._course = source, course

    def follows(self, source: Source) -> bool:
        """Whether that pass is the one that counts now."""
        return self._source is source

    def hand_out(self, source: Source) -> None:
        """One more batch has been handed out."""
        source.hand_out()
        if self._source is source:
            self.batches += 1

    def complete(self, source: Source) -> None:
        """That pass came to its end."""
        if self._source is source:
            self.epoch += 1
            self.batches, self._source = 0, None

    def leave(self, source: Source, failed: bool = False) -> None:
        """That pass is not gone on with: it came to its end if all of it was handed out."""
        if self._source is not source:
            return
        if self._course is not None and self._course.leave(failed):
            self.complete(source)
        else:
            self._left, self._source = source.state(), None

    def state(self) -> State:
        """See DataLoader.state_dict."""
        state: State = {"epoch": self.epoch, "batches": self.batches, "seed": self.seed}
        source = self._source.state() if self._source is not None else self._left
        if self._order is None:
            if source is None and self.streams is not None:
                source = self.streams.state()
            return {**state, "streams": source}
        if source is None and hasattr(self._order, "state_dict"):
            source = self._order.state_dict()
        return {**state, "sampler": source}

    def load(self, state: Mapping[str, Any]) -> None:
        """See DataLoader.load_state_dict."""
        wanted = "streams" if self._order is None else "sampler"
        if not isinstance(state, Mapping) or wanted not in state:
            found = sorted(state) if isinstance(state, Mapping) else state
            raise StateDictError(f"DataLoader: the state has {found!r}, expected {wanted!r} among them")
        for name in ("epoch", "batches"):
            if type(state.get(name)) is not int or state[name] < 0:
                raise StateDictError(f"DataLoader: the state has {name} {state.get(name)!r}, expected a count")
        seed, inner = state.get("seed"), state[wanted]
        if seed is not None and (type(seed) is not int or seed < 0):
            raise StateDictError(f"DataLoader: the state has seed {seed!r}, expected a number of at least 0")
        if self._order is None:
            self.streams = None if inner is None else Streams.loaded(inner, self._readers)
        elif (inner is None) == hasattr(self._order, "state_dict"):
            has = ("none", "one") if inner is None else ("one", "none")
            raise StateDictError(f"DataLoader: the state has {has[0]} of a sampler, this loader's sampler has {has[1]}")
        elif inner is not None:
            self._order.load_state_dict(inner)
        self.epoch, self.batches, self.seed = state["epoch"], state["batches"], seed
        self._loaded, self._source, self._left = True, None, None
