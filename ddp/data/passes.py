"""One pass over a dataset: its batches, fetched by this process or by workers, and how far the consumer has come.

What counts is what was handed out, not what was read ahead. A pass has its `tasks`, an IndexTasks or, for an
IterableDataset, a StreamTasks: `advance()` is called for each batch that the consumer gets, and `position` is where
another pass goes on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddp.data.fetching import BatchMaker, FetchConfig, FetchResult, StartPass, restored_generators, seed_package
from ddp.errors import StateDictError

if TYPE_CHECKING:
    from ddp.data.worker_pool import WorkerPool

State = dict[str, Any]  # of JSON values
Seed = Callable[[int, int], int]  # (_OF_BATCH or _OF_WORKER, number) -> seed

_OF_BATCH, _OF_WORKER = 0, 1


class _Tasks:
    """What a pass reads, in order. position: after what was handed out, where another pass goes on, as JSON values"""

    def __init__(self, position: State | None) -> None:
        self.position = position
        self._ahead: deque[State | None] = deque()  # after each batch that was read and not yet handed out

    def advance(self) -> None:
        """Counts one more of the batches that were read, which the consumer has got."""
        self.position = self._ahead.popleft()

    def leave(self, failed: bool) -> bool:
        """Ends the pass here. True if all of it was handed out. failed: there was an error, and not the end"""
        return False


class IndexTasks(_Tasks):
    """The indices of each batch of a pass that begins now. sampler: of batches, or of indices without batches

    first: the number of the first batch, which is how many to leave out where the sampler has no position to be set to
    position: the sampler's; None where it has none
    """

    def __init__(self, sampler: Any, first: int) -> None:
        self._sampler = sampler
        self._indices: Iterator[Any] = iter(sampler)
        positioned = hasattr(sampler, "state_dict")
        super().__init__(sampler.state_dict() if positioned else None)
        if not positioned:
            self._indices = itertools.islice(self._indices, first, None)
        self._read = self.position  # after what was read
        self._numbers = itertools.count(first)

    def next_task(self, worker: int) -> tuple[int, Any] | None:
        """The number and the indices of the next batch; None: there is no more."""
        for indices in self._indices:
            if self._read is not None:
                counts = hasattr(self._sampler, "state_after")
                self._read = self._sampler.state_after(self._read, 1) if counts else self._sampler.state_dict()
            self._ahead.append(self._read)
            return next(self._numbers), indices
        return None

    def received(self, worker: int, result: FetchResult) -> None:
        """Called for each result, in order."""

    def leave(self, failed: bool) -> bool:
        """See the base class. What was not handed out as a whole, the sampler begins again.

        Where everything that was read was handed out, the sampler is asked whether it has more: only at its end does it
        count an epoch, and the ranks, and workers that read ahead, would come there at different times.
        """
        if not failed and not self._ahead and self._at_end():
            return True
        # A batch sampler of the user's own holds the sampler of this rank as ours does.
        for each in (self._sampler, getattr(self._sampler, "sampler", None)):
            getattr(each, "begin_again", lambda: None)()
        return False

    def _at_end(self) -> bool:
        try:
            ahead = list(itertools.islice(self._indices, 1))
        except Exception:  # of a sampler that was not asked for more yet: it is no end
            return False
        self._indices = itertools.chain(ahead, self._indices)  # an iterator that still has this pass may go on
        return not ahead


class StreamTasks(_Tasks):
    """The batches of a dataset without an index, of which each worker reads its copy; a batch of each in turn.

    position: after what was handed out: {"states": the dataset's own, None where it has none; "handed": batches so far,
    both of each worker; "turns": whose batch comes next, and then}

    Raises: StateDictError for a position of something else, or of another number of workers.
    """

    def __init__(self, workers: int, position: State | None = None) -> None:
        if position is None:
            position = {"states": [None] * workers, "handed": [0] * workers, "turns": list(range(workers))}
        check_streams(position, workers)
        super().__init__(position)
        self._workers = workers
        self._states, self._handed, self.turns = (list(position[name]) for name in ("states", "handed", "turns"))
        self._numbers = [itertools.count(worker + workers * self._handed[worker], workers) for worker in range(workers)]

    def start(self, worker: int, seed: Seed) -> tuple[Any, list[int]]:
        """What a worker's dataset goes on from: its state, or the seeds of batches to leave out where it has none."""
        if (state := self._states[worker]) is not None:
            return state, []
        skipped = range(worker, worker + self._workers * self._handed[worker], self._workers)
        return None, [seed(_OF_BATCH, number) for number in skipped]

    def next_task(self, worker: int) -> tuple[int, None] | None:
        """See IndexTasks: there is always a next one until the worker has none, which its result says."""
        return (next(self._numbers[worker]), None) if worker in self.turns else None

    def received(self, worker: int, result: FetchResult) -> None:
        """Called for each result, in order: notes the position after it."""
        if worker not in self.turns:
            return  # it was at its end before
        self.turns.remove(worker)
        if not result.end:
            self._states[worker] = result.state
            self._handed[worker] += 1
            if not result.last:
                self.turns.append(worker)
        after = {"states": list(self._states), "handed": list(self._handed), "turns": list(self.turns)}
        if not result.end:
            self._ahead.append(after)
        elif self._ahead:
            self._ahead[-1] = after
        else:
            self.position = after


def check_streams(position: Any, workers: int) -> None:
    """Raises: StateDictError if it is no position in so many workers' streams."""
    try:
        states, handed, turns = position["states"], position["handed"], position["turns"]
        count = len(states)
        whole = len(handed) == count and all(type(each) is int and each >= 0 for each in handed)
        whole = whole and len(set(turns)) == len(turns) and set(turns) <= set(range(count))
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise StateDictError(f"DataLoader: the state has streams {position!r}, which are none of an IterableDataset")
    if count != workers:
        raise StateDictError(
            f"DataLoader: the state is of an IterableDataset that {count} processes read, and each has a position"
            f" of its own; this loader's is read by {workers}: num_workers must be what it was"
        )


def _start_message(tasks: IndexTasks | StreamTasks, worker: int, seed: Seed) -> StartPass:
    state, skipped = tasks.start(worker, seed) if isinstance(tasks, StreamTasks) else (None, [])
    return StartPass(seed(_OF_WORKER, worker), state, skipped)


class LocalBatches(Iterator[Any]):
    """The batches of one pass, made by this process when they are asked for."""

    def __init__(self, config: FetchConfig, tasks: IndexTasks | StreamTasks, seed: Seed) -> None:
        self.tasks, self._seed = tasks, seed
        with restored_generators():
            self._maker = BatchMaker(config, seed_package)
            self._maker.start_pass(_start_message(tasks, 0, seed))

    def __next__(self) -> Any:
        task = self.tasks.next_task(0)
        if task is None:
            raise StopIteration
        number, indices = task
        with restored_generators():
            try:
                result = self._maker.make(self._seed(_OF_BATCH, number), indices)
            except StopIteration as error:  # which would end the user's loop
                raise RuntimeError("the dataset or collate_fn raised StopIteration") from error
        self.tasks.received(0, result)
        if result.end:
            raise StopIteration
        return result.batch

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return True

    def close(self) -> None:
        """Nothing: there are no workers to end."""


class WorkerBatches(Iterator[Any]):
    """The batches of one pass, from the workers in turn, so that the wait for the next one is for one connection.

    ahead: tasks that each worker has while the consumer has a batch
    """

    def __init__(self, pool: WorkerPool, tasks: IndexTasks | StreamTasks, seed: Seed, ahead: int) -> None:
        self._pool, self.tasks, self._seed = pool, tasks, seed
        pool.start_pass([_start_message(tasks, worker, seed) for worker in range(len(pool))])
        self._requested: deque[tuple[int, int]] = deque()  # worker and number of what is to come, in order
        turns = tasks.turns if isinstance(tasks, StreamTasks) else range(len(pool))
        for worker in [*turns] * ahead:
            self._request(worker)
        self.close = pool.close

    def _request(self, worker: int) -> None:
        task = self.tasks.next_task(worker)
        if task is not None:
            number, indices = task
            self._requested.append((worker, number))
            self._pool.request(worker, self._seed(_OF_BATCH, number), indices)

    def __next__(self) -> Any:
        while self._requested:
            worker, number = self._requested.popleft()
            result = self._pool.receive(worker, number)
            self.tasks.received(worker, result)
            if not result.end:  # else other requests to this worker have the same result
                self._request(worker)
                return result.batch
        raise StopIteration

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return not self._requested or self._pool.ready(self._requested[0][0])
