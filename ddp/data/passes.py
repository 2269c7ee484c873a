"""One pass over a dataset: its batches, fetched by this process or by workers, and how far the consumer has come.

What counts is what was handed out, not what was read ahead. A pass has its `tasks`, an IndexTasks or, for an
IterableDataset, a StreamTasks: `advance()` is called for each batch that the consumer gets, and `state()` is where
another pass goes on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddp.data.fetching import BatchMaker, FetchConfig, FetchResult, SeededGenerators
from ddp.errors import StateDictError

if TYPE_CHECKING:
    from ddp.data.worker_pool import WorkerPool

State = dict[str, Any]  # of JSON values
Seed = Callable[[int, int], int]  # (_OF_BATCH or _OF_WORKER, number) -> seed

_OF_BATCH, _OF_WORKER = 0, 1


class IndexTasks:
    """The indices of each batch of a pass that begins now. sampler: of batches, or of indices without batches

    first: the number of the first batch, which is how many to leave out where the sampler has no position to be set to
    """

    def __init__(self, sampler: Any, first: int) -> None:
        self._sampler = sampler
        self._counts = hasattr(sampler, "state_after")
        self._stateful = hasattr(sampler, "state_dict")
        self._states: deque[State] = deque()  # after each batch that was read ahead, where the sampler keeps no count
        indices = iter(sampler)
        self._began = sampler.state_dict() if self._stateful else None
        self._indices: Iterator[Any] = indices if self._stateful else itertools.islice(indices, first, None)
        self._first, self._read, self._advanced = first, 0, 0

    def starts(self, workers: int, seed: Seed) -> list[tuple[Any, list[int]]]:
        """What each worker begins with: the state of a stream, and the seeds of batches that it leaves out."""
        return [(None, [])] * workers

    def next_task(self, worker: int) -> tuple[int, Any] | None:
        """The number and the indices of the next batch; None: there is no more."""
        for indices in self._indices:
            self._read += 1
            if self._stateful and not self._counts:
                self._states.append(self._sampler.state_dict())
            return self._first + self._read - 1, indices
        return None

    def received(self, worker: int, result: FetchResult) -> None:
        """Called for each result, in order."""

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
            getattr(each, "begin_again", lambda: None)()
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


class StreamTasks:
    """The batches of a dataset without an index, of which each worker reads its copy; a batch of each in turn.

    state: where another pass was left, {"states": the dataset's own, None where it has none; "handed": batches so far,
    both of each worker; "turns": whose batch comes next, and then}; None: at the beginning

    Raises: StateDictError for a state of something else, or of another number of workers.
    """

    def __init__(self, workers: int, state: Any = None) -> None:
        if state is None:
            state = {"states": [None] * workers, "handed": [0] * workers, "turns": list(range(workers))}
        check_streams(state, workers)
        self._state: State = state  # after what was handed out
        self._ahead: deque[State] = deque()  # after each batch that was read and not yet handed out
        self._states, self._handed, self._turns = list(state["states"]), list(state["handed"]), list(state["turns"])
        self._numbers = [itertools.count(worker + workers * self._handed[worker], workers) for worker in range(workers)]

    def starts(self, workers: int, seed: Seed) -> list[tuple[Any, list[int]]]:
        """See IndexTasks. A dataset that has no state is read again, and its first batches are left out."""
        skipped = [range(worker, worker + workers * self._handed[worker], workers) for worker in range(workers)]
        return [
            (state, [] if state is not None else [seed(_OF_BATCH, number) for number in skipped[worker]])
            for worker, state in enumerate(self._states)
        ]

    def next_task(self, worker: int) -> tuple[int, None] | None:
        """See IndexTasks: there is always a next one until the worker has none, which its result says."""
        return (next(self._numbers[worker]), None) if worker in self._turns else None

    def received(self, worker: int, result: FetchResult) -> None:
        """Called for each result, in order: notes what the state is after it."""
        if worker not in self._turns:
            return  # it was at its end before
        self._turns.remove(worker)
        if not result.end:
            self._states[worker] = result.state
            self._handed[worker] += 1
            if not result.last:
                self._turns.append(worker)
        after = {"states": list(self._states), "handed": list(self._handed), "turns": list(self._turns)}
        if not result.end:
            self._ahead.append(after)
        elif self._ahead:
            self._ahead[-1] = after
        else:
            self._state = after

    def advance(self) -> None:
        """Counts one more of the batches that were read, which the consumer has got."""
        self._state = self._ahead.popleft()

    def leave(self, failed: bool) -> bool:
        """See IndexTasks."""
        return False

    def state(self) -> State:
        """All of it, as JSON values if the dataset's own are."""
        return self._state


def check_streams(state: Any, workers: int) -> None:
    """Raises: StateDictError if it is no state of so many workers' streams."""
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


class LocalPool:
    """This process, as a pool of one worker that makes a batch when it is received."""

    def __init__(self, config: FetchConfig) -> None:
        self._maker = BatchMaker(config)
        self._task: tuple[int, Any] = 0, None

    def __len__(self) -> int:
        return 1

    def start_pass(self, seeds: Sequence[int], starts: Sequence[tuple[Any, list[int]]]) -> None:
        with SeededGenerators(seeds[0]):
            self._maker.start_pass(*starts[0], SeededGenerators)

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


class BatchSource(Iterator[Any]):
    """The batches of one pass, from the workers in turn.

    ahead: tasks that each worker has while the consumer has a batch; 0: indices are read when their batch is asked for
    So it is known whose batch is next, and the wait for it is for one connection.
    """

    def __init__(self, pool: WorkerPool | LocalPool, tasks: IndexTasks | StreamTasks, seed: Seed, ahead: int) -> None:
        self.pool, self.tasks, self._seed, self._ahead = pool, tasks, seed, ahead
        n = len(pool)
        pool.start_pass([seed(_OF_WORKER, worker) for worker in range(n)], tasks.starts(n, seed))
        self._requested: deque[tuple[int, int]] = deque()  # worker and number of what is to come, in order
        turns = tasks.state()["turns"] if isinstance(tasks, StreamTasks) else range(n)
        for _ in range(ahead):
            for worker in turns:
                self._request(worker)

    def _request(self, worker: int) -> None:
        task = self.tasks.next_task(worker)
        if task is not None:
            number, indices = task
            self._requested.append((worker, number))
            self.pool.request(worker, self._seed(_OF_BATCH, number), indices)

    def __next__(self) -> Any:
        while True:
            if not self._ahead:
                self._request(0)
            if not self._requested:
                raise StopIteration
            worker, number = self._requested.popleft()
            result = self.pool.receive(worker, number)
            self.tasks.received(worker, result)
            if result.end:
                continue  # of this worker; other requests to it have the same result
            if self._ahead:
                self._request(worker)
            return result.batch

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return not self._requested or self.pool.ready(self._requested[0][0])
