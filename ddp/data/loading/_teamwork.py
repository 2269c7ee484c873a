"""One pass over a dataset that workers fetch; the batches come in the order of the sampler all the same.

Batch k is made by worker k mod n, and each worker has a few tasks ahead. So whose batch is the next one is known, and
the wait for it is a wait for one line.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from ddp.data.loading._course import Course
from ddp.data.loading._crew import Crew, raised
from ddp.data.loading._passes import Seeds, Streams


class Together:
    """Batches that workers fetch. ahead: tasks that each of them has at most."""

    def __init__(self, crew: Crew, course: Course, seeds: Seeds, first: int, ahead: int) -> None:
        self._crew, self._course, self._seeds = crew, course, seeds
        n = len(crew)
        crew.begin([seeds.of_worker(worker) for worker in range(n)], [None] * n, [[] for _ in range(n)])
        self._tasks = enumerate(course, first)
        self._asked: deque[tuple[int, int]] = deque()  # worker and number of what is to come, in order
        self._workers = itertools.cycle(range(n))
        for _ in range(n * ahead):
            self._ask()

    def _ask(self) -> None:
        for number, indices in itertools.islice(self._tasks, 1):
            worker = next(self._workers)
            self._asked.append((worker, number))
            self._crew.ask(worker, self._seeds.of_batch(number), indices)

    def __next__(self) -> Any:
        if not self._asked:
            raise StopIteration
        worker, number = self._asked.popleft()
        answer = self._crew.receive(worker)
        if answer.failure is not None:
            raise raised(answer.failure, worker, len(self._crew), number)
        batch = self._crew.unpacked(worker, answer)
        self._ask()
        return batch

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return not self._asked or self._crew.ready(self._asked[0][0])

    def hand_out(self) -> None:
        """The consumer has got one more of the batches."""
        self._course.hand_out()

    def state(self) -> Any:
        """The sampler's."""
        return self._course.state()

    def close(self) -> None:
        """Ends the workers."""
        self._crew.close()


class TogetherInStream:
    """Batches of a dataset without an index, of which each worker reads its copy; a batch of each in turn."""

    def __init__(self, crew: Crew, seeds: Seeds, ahead: int, began: Streams | None) -> None:
        self._crew, self._seeds = crew, seeds
        n = len(crew)
        self._streams = streams = Streams.of(n) if began is None else began
        crew.begin(
            [seeds.of_worker(worker) for worker in range(n)],
            streams.states,
            [[seeds.of_batch(number) for number in streams.skipped(worker)] for worker in range(n)],
        )
        self._numbers = [itertools.count(worker + n * streams.handed[worker], n) for worker in range(n)]
        self._asked: list[deque[int]] = [deque() for _ in range(n)]
        self._turns = deque(streams.turns)
        for _ in range(ahead):
            for worker in streams.turns:
                self._ask(worker)

    def _ask(self, worker: int) -> None:
        number = next(self._numbers[worker])
        self._asked[worker].append(number)
        self._crew.ask(worker, self._seeds.of_batch(number), None)

    def __next__(self) -> Any:
        turns = self._turns
        while turns:
            worker = turns[0]
            number = self._asked[worker].popleft()
            answer = self._crew.receive(worker)
            if answer.failure is not None:
                raise raised(answer.failure, worker, len(self._crew), number)
            if answer.batch is None:
                self._streams.end(turns.popleft())  # what else it was asked for has the same answer
                continue
            batch = self._crew.unpacked(worker, answer)
            self._streams.read(worker, answer.state)
            turns.popleft()
            if answer.last:
                self._streams.end(worker)
            else:
                turns.append(worker)
                self._ask(worker)
            return batch
        raise StopIteration

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting for others."""
        return not self._turns or self._crew.ready(self._turns[0])

    def hand_out(self) -> None:
        """The consumer has got one more of the batches."""
        self._streams.hand_out()

    def state(self) -> Any:
        """Where the streams are."""
        return self._streams.state()

    def close(self) -> None:
        """Ends the workers."""
        self._crew.close()
