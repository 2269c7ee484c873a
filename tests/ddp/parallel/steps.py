"""Steps made by hand, and the timelines of ranks that exchange their timestamps, for tests of statistics and traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ddp.parallel.stats import Timeline
from ddp.parallel.step_trace import Step

MS = 1_000_000
TWO = (("out",), ("first", "second"))
CONTENTS = tuple((names, len(names) << 20) for names in TWO)


def buckets(*members: tuple[str, ...]) -> Any:
    """Buckets of these parameters, a MiB each."""
    names = tuple(name for bucket in members for name in bucket)
    memory = SimpleNamespace(buffers=[np.zeros(len(bucket) << 20, np.uint8) for bucket in members])
    places = iter(range(len(names)))
    return SimpleNamespace(memory=memory, names=names, members=tuple(tuple(next(places) for _ in m) for m in members))


def make_step(number: int, at: float, late: float = 0.0, clock: int = 0, **changes: Any) -> Step:
    """A step of 100 ms that ends at `at` + 100 ms: 20 other, 30 forward, 40 backward, 10 waiting.

    late: ms that this rank takes longer before forward, and waits less in the end; clock: ns that its clock is ahead
    """
    start = round((at + late) * MS) + clock
    end = round((at + 100) * MS) + clock
    step = Step(
        number=number,
        forward=(start + 20 * MS, start + 49 * MS),
        begun=start + 50 * MS,
        computed=start + 90 * MS,
        ended=end,
        control=(start + 50 * MS, end - 40 * MS),
        ready=[start + 60 * MS, start + 90 * MS],
        times=[(start + 60 * MS, end - 20 * MS), (start + 90 * MS, end - MS)],
        contents=CONTENTS,
    )
    for name, value in changes.items():
        setattr(step, name, value)
    return step


class Ranks:
    """The timelines of all ranks, which exchange timestamps as they do in training."""

    def __init__(self, size: int, plan: Any = TWO, nodes: list[int] | None = None, job: int = 1) -> None:
        self.timelines = [Timeline(rank, size, nodes or [0] * size, job) for rank in range(size)]
        for timeline in self.timelines:
            timeline.set_buckets(buckets(*plan))

    def run(self, *steps: Step) -> None:
        rows = [timeline.timestamps() for timeline in self.timelines]
        for timeline, step in zip(self.timelines, steps, strict=True):
            message = np.array(rows)
            timeline.receive(message)
            message[:] = -1  # it is used again
            timeline.add(step)

    def stats(self) -> list[Any]:
        return [timeline.stats() for timeline in self.timelines]
