"""One pass over a dataset: its batches, fetched by this process or by workers, and how far the consumer has come.

What counts is what was handed out, not what was read ahead. Each pass has a `progress`, an IndexIterator or the
StreamPositions of an IterableDataset: `advance()` is called for each batch that the consumer gets, and `state()` is
where another pass goes on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ddp.data.fetching import BatchMaker, FetchConfig, FetchResult, SeededGenerators, mix_seed
from ddp.errors import StateDictError

State = dict[str, Any]  # of JSON values

# Seeds are drawn from (loader's seed, pass, what, number): what a worker begins with is apart from batches.
_OF_BATCH, _OF_WORKER = 0, 1


class PassSeeds:
    """The seeds of one pass. key: the loader's own, the number of the pass, and what tells ranks apart."""

    def __init__(self, *key: int) -> None:
        self._key = key

    def of_batch(self, number: int) -> int:
        """While that batch is fetched."""
        return mix_seed(*self._key, _OF_BATCH, number)

    def of_worker(self, worker: int) -> int:
        """While that worker begins."""
        return mix_seed(*self._key, _OF_WORKER, worker)


class IndexIterator:
    """The indices of each batch of a pass that begins now. sampler: of batches, or of indices without batches

    skipped: batches to leave out, where the sampler has no position to be set to
    """

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._counts = hasattr(sampler, "state_after")
        self._stateful = hasattr(sampler, "state_dict")
        self._states: deque[State] = deque()  # after each batch that was read ahead, where the sampler keeps no count
        indices = iter(sampler)
        self._began = sampler.state_dict() if self._stateful else None
        if not self._stateful:
            indices = itertools.islice(indices, skipped, None)
        self._indices: Iterator[Any] = indices
        self._read = self._advanced = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The indices of the next batch."""
        indices = next(self._indices)
        self._read += 1
        if self._stateful and not self._counts:
            self._states.append(self._sampler.state_dict())
        return indices

    def advance(self) -> None:
        """Counts one more batch that the consumer has got."""
        self._advanced += 1
        if self._states:
            self._began = self._states.popleft()

    def leave(self, failed: bool) -> bool:
        """Ends the pass here. True if all of it was handed out; else the sampler begins it again.

        Where everything that was read was handed out, the sampler is asked whether it has more: only at its end does it
        count an epoch, and the ranks, and workers that read ahead, would come there at different times.

        failed: there was an error, and not the end
        """
        if not failed and self._read == self._advanced and self._at_end():
            return True
        # A batch sampler of the user's own holds the sampler of this rank as ours does.
        for each in (self._sampler, getattr(self._sampler, "sampler", None)):
            begin_again: Any = getattr(each, "begin_again", None)
            if begin_again is not None:
                begin_again()
        return False

    def _at_end(self) -> bool:
        try:
            ahead = list(itertools.islice(self._indices, 1))
        except Exception:  # of a sampler that was not asked for more yet: it is no end
            return False
        self._indices = itertools.chain(ahead, self._indices)  # an iterator that still has this pass may go on
        return not ahead

    def state(self) -> State | None:
        """The sampler's, after what was handed out; None where it has none."""
        if self._counts:
            after: State = self._sampler.state_after(self._began, self._advanced)
            return after
        return self._began


class StreamPositions:
    """Where the streams of a dataset without an index are, one for each worker.

    states: the dataset's own, None where it has none; handed: batches so far; turns: whose batch comes next, and then
    """

    def __init__(self, states: Sequence[Any], handed: Sequence[int], turns: Sequence[int]) -> None:
        self.states, self.handed, self.turns = list(states), list(handed), deque(turns)
        self._read: deque[tuple[int, Any, bool]] = deque()  # what has not been handed out: worker, state, its end

    @classmethod
    def at_start(cls, workers: int) -> StreamPositions:
        """At the beginning."""
        return cls([None] * workers, [0] * workers, range(workers))

    @classmethod
    def loaded(cls, state: Any, workers: int) -> StreamPositions:
        """Where a state says that they are. Raises: StateDictError if it is none of so many workers."""
        try:
            states, handed, turns = state["states"], state["handed"], state["turns"]
            count = len(states)
            whole = len(handed) == count and all(type(each) is int and each >= 0 for each in handed)
            whole = whole and len(set(turns)) == len(turns) and set(turns) <= set(range(count))
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise StateDictError(f"DataLoader: the state has streams {state!r}, which are none of an IterableDataset")
        if count != workers:
            raise StateDictError(
                f"DataLoader: the state is of an IterableDataset that {count} processes read, and each has a position"
                f" of its own; this loader's is read by {workers}: num_workers must be what it was"
            )
        return cls(states, handed, turns)

    def skipped(self, worker: int) -> list[int]:
        """Numbers of the batches that a worker reads and leaves out, as its dataset has no position to be set to."""
        if self.states[worker] is not None:
            return []
        return [worker + len(self.states) * batch for batch in range(self.handed[worker])]

    def read(self, worker: int, state: Any) -> None:
        """Notes that a batch was read from the worker whose turn it was."""
        self._read.append((worker, state, False))

    def end(self, worker: int) -> None:
        """Notes that a worker has no more batches."""
        if self._read:
            self._read.append((worker, None, True))
        else:
            self.turns.remove(worker)

    def advance(self) -> None:
        """Counts one more of the batches that were read, which the consumer has got."""
        worker, state, over = self._read.popleft()
        assert not over
        self.states[worker] = state
        self.handed[worker] += 1
        self.turns.rotate(-1)
        while self._read and self._read[0][2]:  # a worker at its end has no turn in a state, either
            self.turns.remove(self._read.popleft()[0])

    def state(self) -> State:
        """All of it, as JSON values if the dataset's own are."""
        return {"states": list(self.states), "handed": list(self.handed), "turns": list(self.turns)}


class BatchWorkers(Protocol):
    """Who makes the batches: worker processes (`ddp.data.worker_pool`), or this process."""

    def __len__(self) -> int: ...

    def start_pass(self, seeds: Sequence[int], states: Sequence[Any], skipped: Sequence[list[int]]) -> None:
        """Begins a pass. seeds: of each worker; states, skipped: where a stream goes on, see `BatchMaker`"""

    def request(self, worker: int, seed: int, indices: Any) -> None:
        """Gives a worker a task. indices: None for the next batch of a stream."""

    def receive(self, worker: int, number: int) -> FetchResult:
        """The result of a worker's oldest task, whose batch has that number. Raises: what the task raised."""

    def ready(self, worker: int) -> bool:
        """Whether `receive` need not wait."""

    def close(self) -> None:
        """Ends the workers."""


class LocalPool:
    """This process, as a pool of one worker that makes a batch when it is received."""

    def __init__(self, config: FetchConfig) -> None:
        self._maker = BatchMaker(config)
        self._task: tuple[int, Any] = 0, None

    def __len__(self) -> int:
        return 1

    def start_pass(self, seeds: Sequence[int], states: Sequence[Any], skipped: Sequence[list[int]]) -> None:
        with SeededGenerators(seeds[0]):
            self._maker.start_pass(states[0], skipped[0], SeededGenerators)

    def request(self, worker: int, seed: int, indices: Any) -> None:
        self._task = seed, indices  # of which there is one at a time

    def receive(self, worker: int, number: int) -> FetchResult:
        seed, indices = self._task
        with SeededGenerators(seed):
            try:
                return self._maker.make(indices)
            except StopIteration as error:  # which would end the user's loop
                raise RuntimeError("the dataset or collate_fn raised StopIteration") from error

    def ready(self, worker: int) -> bool:
        return True

    def close(self) -> None:
        pass


class IndexedBatches:
    """Batches of a dataset with an index. first: the number of the first one in its pass

    ahead: tasks that each worker has while the consumer has a batch; 0: indices are read when their batch is asked for
    Batch k is made by worker k mod n. So it is known whose batch is next, and the wait for it is for one connection.
    """

    def __init__(self, pool: BatchWorkers, indices: IndexIterator, seeds: PassSeeds, first: int, ahead: int) -> None:
        self.pool, self.progress, self._seeds, self._ahead = pool, indices, seeds, ahead
        n = len(pool)
        pool.start_pass([seeds.of_worker(worker) for worker in range(n)], [None] * n, [[] for _ in range(n)])
        self._tasks = enumerate(indices, first)
        self._requested: deque[tuple[int, int]] = deque()  # worker and number of what is to come, in order
        self._workers = itertools.cycle(range(n))
        for _ in range(n * ahead):
            self._request()

    def _request(self) -> None:
        task = next(self._tasks, None)
        if task is not None:
            worker, (number, indices) = next(self._workers), task
            self._requested.append((worker, number))
            self.pool.request(worker, self._seeds.of_batch(number), indices)

    def __next__(self) -> Any:
        if not self._ahead:
            self._request()
        if not self._requested:
            raise StopIteration
        result = self.pool.receive(*self._requested.popleft())
        if self._ahead:
            self._request()
        return result.batch

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return not self._requested or self.pool.ready(self._requested[0][0])


class StreamBatches:
    """Batches of a dataset without an index, of which each worker reads its copy; a batch of each in turn."""

    def __init__(self, pool: BatchWorkers, positions: StreamPositions, seeds: PassSeeds, ahead: int) -> None:
        self.pool, self.progress, self._seeds, self._ahead = pool, positions, seeds, ahead
        n = len(pool)
        pool.start_pass(
            [seeds.of_worker(worker) for worker in range(n)],
            positions.states,
            [[seeds.of_batch(number) for number in positions.skipped(worker)] for worker in range(n)],
        )
        self._numbers = [itertools.count(worker + n * positions.handed[worker], n) for worker in range(n)]
        self._requested: list[deque[int]] = [deque() for _ in range(n)]
        self._turns = deque(positions.turns)
        for _ in range(ahead):
            for worker in positions.turns:
                self._request(worker)

    def _request(self, worker: int) -> None:
        number = next(self._numbers[worker])
        self._requested[worker].append(number)
        self.pool.request(worker, self._seeds.of_batch(number), None)

    def __next__(self) -> Any:
        turns = self._turns
        while turns:
            worker = turns[0]
            if not self._ahead:
                self._request(worker)
            result = self.pool.receive(worker, self._requested[worker].popleft())
            if result.end:
                self.progress.end(turns.popleft())  # its other requests have the same result
                continue
            self.progress.read(worker, result.state)
            turns.popleft()
            if result.last:
                self.progress.end(worker)
            else:
                turns.append(worker)
                if self._ahead:
                    self._request(worker)
            return result.batch
        raise StopIteration

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return not self._turns or self.pool.ready(self._turns[0])
