"""One pass over a dataset that this process fetches itself, and what every pass has: seeds, and places in streams."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from ddp.data.loading._course import Course
from ddp.data.loading._fetching import Content, Fetcher, StreamFetcher
from ddp.data.loading._seeds import Drawing, mixed
from ddp.errors import StateDictError

# Seeds are drawn from (loader's seed, pass, what, number): what a worker begins with is apart from batches.
_OF_BATCH, _OF_WORKER = 0, 1


class Seeds:
    """The seeds of one pass. key: the loader's own, the number of the pass, and what tells ranks apart."""

    def __init__(self, *key: int) -> None:
        self._key = key

    def of_batch(self, number: int) -> int:
        """While that batch is fetched."""
        return mixed(*self._key, _OF_BATCH, number)

    def of_worker(self, worker: int) -> int:
        """While that worker begins."""
        return mixed(*self._key, _OF_WORKER, worker)


class Streams:
    """Where the streams of a dataset without an index are, one for each worker.

    states: the dataset's own, None where it has none; handed: batches so far; turns: whose batch comes next, and then
    """

    def __init__(self, states: Sequence[Any], handed: Sequence[int], turns: Sequence[int]) -> None:
        self.states, self.handed, self.turns = list(states), list(handed), deque(turns)
        self._read: deque[tuple[int, Any, bool]] = deque()  # what has not been handed out: worker, state, its end

    @classmethod
    def of(cls, workers: int) -> Streams:
        """At the beginning."""
        return cls([None] * workers, [0] * workers, range(workers))

    @classmethod
    def loaded(cls, state: Any, workers: int) -> Streams:
        """Where a state says that they are. Raises: StateDictError if it is none of so many workers."""
        try:
            states, handed, turns = state["states"], state["handed"], state["turns"]
            read_by = len(states)
            whole = len(handed) == read_by and all(type(each) is int and each >= 0 for each in handed)
            whole = whole and len(set(turns)) == len(turns) and set(turns) <= set(range(read_by))
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise StateDictError(f"DataLoader: the state has streams {state!r}, which are none of an IterableDataset")
        if read_by != workers:
            raise StateDictError(
                f"DataLoader: the state is of an IterableDataset that {read_by} processes read, and each has a position"
                f" of its own; this loader's is read by {workers}: num_workers must be what it was"
            )
        return cls(states, handed, turns)

    def skipped(self, worker: int) -> list[int]:
        """Numbers of the batches that a worker reads and leaves out, as its dataset cannot be told where to go on."""
        if self.states[worker] is not None:
            return []
        return [worker + len(self.states) * batch for batch in range(self.handed[worker])]

    def read(self, worker: int, state: Any) -> None:
        """A batch was read from that worker, whose turn it was."""
        self._read.append((worker, state, False))

    def end(self, worker: int) -> None:
        """That worker has no more batches."""
        if self._read:
            self._read.append((worker, None, True))
        else:
            self.turns.remove(worker)

    def hand_out(self) -> None:
        """The consumer has got one more of the batches that were read."""
        worker, state, over = self._read.popleft()
        assert not over
        self.states[worker] = state
        self.handed[worker] += 1
        self.turns.rotate(-1)
        while self._read and self._read[0][2]:  # who has come to an end has no turn in a state, either
            self.turns.remove(self._read.popleft()[0])

    def state(self) -> dict[str, Any]:
        """All of it, as JSON values if the dataset's own are."""
        return {"states": list(self.states), "handed": list(self.handed), "turns": list(self.turns)}


class Alone:
    """Batches of a dataset with an index, fetched here. first: the number of the first one in its pass."""

    def __init__(self, content: Content, course: Course, seeds: Seeds, first: int) -> None:
        self._fetcher = Fetcher(content.dataset, content.collate, content.size is not None)
        self._course, self._seeds = course, seeds
        self._numbers = itertools.count(first)

    def __next__(self) -> Any:
        indices = next(self._course)
        with Drawing(self._seeds.of_batch(next(self._numbers))):
            try:
                return self._fetcher.fetch(indices)
            except StopIteration as error:  # which would end the user's loop
                raise RuntimeError("the dataset or collate_fn raised StopIteration") from error

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return True

    def hand_out(self) -> None:
        """The consumer has got one more of the batches."""
        self._course.hand_out()

    def state(self) -> Any:
        """The sampler's."""
        return self._course.state()

    def close(self) -> None:
        """There is nothing to end."""


class AloneInStream:
    """Batches of a dataset without an index, read here. began: where its stream goes on."""

    def __init__(self, content: Content, seeds: Seeds, began: Streams | None) -> None:
        self._dataset = content.dataset
        self._seeds = seeds
        self._streams = Streams.of(1) if began is None else began
        with Drawing(seeds.of_worker(0)):
            if self._streams.states[0] is not None:
                self._dataset.load_state_dict(self._streams.states[0])
            self._fetcher = StreamFetcher(content.dataset, content.collate, content.size, content.drop_last)
        try:
            for number in self._streams.skipped(0):
                with Drawing(seeds.of_batch(number)):
                    self._fetcher.skip()
        except StopIteration:
            pass  # the stream is shorter than it was: its end is told when a batch is asked for
        self._numbers = itertools.count(self._streams.handed[0])

    def __next__(self) -> Any:
        if self._fetcher.over or not self._streams.turns:
            raise StopIteration
        with Drawing(self._seeds.of_batch(next(self._numbers))):
            batch = self._fetcher.fetch()
        own = self._dataset.state_dict() if hasattr(self._dataset, "state_dict") else None
        self._streams.read(0, own)
        if self._fetcher.over:
            self._streams.end(0)
        return batch

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return True

    def hand_out(self) -> None:
        """The consumer has got one more of the batches."""
        self._streams.hand_out()

    def state(self) -> Any:
        """Where the stream is."""
        return self._streams.state()

    def close(self) -> None:
        """There is nothing to end."""
