"""One pass over a dataset: its batches in order, made by this process or by workers, and the position after each.

A batch counts as consumed when the consumer has it, not when it was read. So each batch comes with the position after
it, which the loader records as it hands the batch out. For a stream the position has the state of each worker's copy
of the dataset; otherwise it is None, because the number of batches determines it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddp._tensor.dtypes import is_count
from ddp.data.fetching import BatchMaker, FetchConfig, FetchResult, StartPass, restored_generators, seed_package
from ddp.errors import StateDictError

State = dict[str, Any]  # of JSON values
Seed = Callable[[int, int], int]  # (OF_BATCH or OF_WORKER, number) -> seed

OF_BATCH = 0
OF_WORKER = 1


class Batches(Iterator[tuple[Any, Any]]):
    """Iterates over (batch, position after it) of one pass. Workers take turns, so it waits for one worker at a time.

    pool: a WorkerPool, or a LocalPool
    ahead: number of tasks that each worker still has when the consumer gets a batch
    """

    workers: Sequence[int] = ()  # the workers that still give batches, in the order of their next batches
    position: State | None = None  # of a stream: the position after the last batch that was received

    def __init__(self, pool: Any, seed: Seed, ahead: int) -> None:
        self._pool = pool
        self._seed = seed
        pool.start_pass([StartPass(seed(OF_WORKER, worker), *self._start(worker)) for worker in range(len(pool))])
        self._requested: deque[int] = deque()  # the worker of each requested batch, in order
        for worker in [*self.workers] * ahead:
            self._request(worker)
        self.close = pool.close

    def _start(self, worker: int) -> tuple[Any, Sequence[int]]:
        """`state` and `skipped` of a worker's StartPass."""
        return None, ()

    def _next_task(self, worker: int) -> tuple[int, Any] | None:
        """The number and the indices of the next batch of this worker; None: it has no more."""
        raise NotImplementedError

    def _received(self, worker: int, result: FetchResult) -> None:
        """Called for each result, in order."""

    def _request(self, worker: int) -> None:
        task = self._next_task(worker)
        if task is not None:
            number, indices = task
            self._requested.append(worker)
            self._pool.request(worker, number, self._seed(OF_BATCH, number), indices)

    def __next__(self) -> tuple[Any, Any]:
        while True:
            self._request(self._requested[0] if self._requested else 0)
            if not self._requested:
                raise StopIteration
            worker = self._requested.popleft()
            result = self._pool.receive(worker)
            self._received(worker, result)
            if not result.end:  # at the end of a worker, all of its requests get results with `end` set
                return result.batch, self.position

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for a worker."""
        return not self._requested or self._pool.ready(self._requested[0])

    def leave(self, handed: int, failed: bool) -> bool:
        """Ends the pass after `handed` batches. Returns whether these were all. failed: whether there was an error"""
        return False


class IndexBatches(Batches):
    """The batches of a dataset with an index.

    order: the iterator of `sampler`, over lists of the indices of a batch, or over single indices
    first: the number of the first batch
    """

    def __init__(self, pool: Any, seed: Seed, ahead: int, sampler: Any, order: Iterator[Any], first: int) -> None:
        self._sampler = sampler
        self._order = order
        self._number = first
        self.workers = range(len(pool))
        super().__init__(pool, seed, ahead)

    def _next_task(self, worker: int) -> tuple[int, Any] | None:
        for indices in self._order:
            self._number += 1
            return self._number - 1, indices
        return None

    def leave(self, handed: int, failed: bool) -> bool:
        """See the base class. If not all batches were handed out, the sampler begins this epoch again.

        If all batches that were read were handed out, the sampler is asked for one more. A sampler counts an epoch
        only when it is exhausted; without this request, the count would depend on how far this rank has read ahead.
        """
        if not failed and handed == self._number and self._at_end():
            return True
        # A user's batch sampler, like ours, may hold the sampler of this rank as `sampler`.
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            getattr(sampler, "begin_again", lambda: None)()
        return False

    def _at_end(self) -> bool:
        try:
            ahead = list(itertools.islice(self._order, 1))
        except Exception:  # the sampler failed to make one more batch, so it is not at its end
            return False
        # The batch is put back: a user's iterator of this pass may go on.
        self._order = itertools.chain(ahead, self._order)
        return not ahead


class StreamBatches(Batches):
    """The batches of a dataset without an index. Each worker reads its own copy; the workers give batches in turn.

    position: where the pass begins, and later the position after the batches received: {"states": for each worker the
    state of its dataset, or None; "handed": for each worker its number of batches so far; "turns": the workers
    whose streams have not ended, in the order of their next batches}
    """

    def __init__(self, pool: Any, seed: Seed, ahead: int, position: State | None) -> None:
        count = len(pool)
        if position is None:
            position = {"states": [None] * count, "handed": [0] * count, "turns": [*range(count)]}
        self.position = position
        self.workers = position["turns"]
        self._tasks = [itertools.count(worker + count * position["handed"][worker], count) for worker in range(count)]
        super().__init__(pool, seed, ahead)

    def _start(self, worker: int) -> tuple[Any, Sequence[int]]:
        assert self.position is not None
        # A stream that has ended gets no state: if it were loaded, the worker's next pass would begin at the end.
        if worker not in self.workers:
            return None, ()
        state = self.position["states"][worker]
        count = len(self._tasks)
        skipped = range(worker, worker + count * self.position["handed"][worker], count) if state is None else ()
        return state, [self._seed(OF_BATCH, number) for number in skipped]

    def _next_task(self, worker: int) -> tuple[int, Any] | None:
        return (next(self._tasks[worker]), None) if worker in self.workers else None

    def _received(self, worker: int, result: FetchResult) -> None:
        if worker not in self.workers:
            return  # its stream had ended before
        assert self.position is not None
        after = {name: list(value) for name, value in self.position.items()}
        after["turns"].remove(worker)
        if not result.end:
            after["states"][worker] = result.state
            after["handed"][worker] += 1
            if not result.last:
                after["turns"].append(worker)
        self.position = after
        self.workers = after["turns"]


def check_streams(position: Any, workers: int) -> None:
    """Checks that `position` is a position in the streams of `workers` workers. Raises: StateDictError if it is not."""
    try:
        count = len(position["states"])
        valid = len(position["handed"]) == count and {*position["turns"]} <= {*range(count)}
        valid = valid and all(is_count(handed) for handed in position["handed"])
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise StateDictError(f"DataLoader: {position!r} is no position in an IterableDataset")
    if count != workers:
        raise StateDictError(
            f"DataLoader: the state is of an IterableDataset that {count} processes read, and each has a position"
            f" of its own; this loader's is read by {workers}: num_workers must be what it was"
        )


class LocalPool:
    """Makes batches in this process, in the place of a WorkerPool. A batch is made when it is received."""

    def __init__(self, config: FetchConfig) -> None:
        self._maker = BatchMaker(config, seed_package)
        self._task: tuple[int, Any] = (0, None)

    def __len__(self) -> int:
        return 1

    def start_pass(self, starts: Sequence[StartPass]) -> None:
        """See WorkerPool."""
        with restored_generators():
            self._maker.start_pass(starts[0])

    def request(self, worker: int, number: int, seed: int, indices: Any) -> None:
        """See WorkerPool."""
        self._task = seed, indices

    def receive(self, worker: int) -> FetchResult:
        """See WorkerPool."""
        with restored_generators():
            try:
                return self._maker.make(*self._task)
            except StopIteration as error:  # which would end the user's loop
                raise RuntimeError("the dataset or collate_fn raised StopIteration") from error

    def ready(self, worker: int) -> bool:
        """See WorkerPool."""
        return True

    def close(self) -> None:
        """Does nothing: there are no workers to end."""
