"""What ranks tell each other of a step: how much, and of which buckets."""

from __future__ import annotations

import pytest

from ddp.parallel.timeline import Step
from ddp.parallel.timeline.marks import ARRIVALS, row_of, row_width, told_buckets


@pytest.mark.parametrize(
    ("size", "buckets", "told"), [(2, 5, 5), (1, 0, 0), (64, 30, 12), (64, 7, 7), (1000, 30, 2), (1000, 1, 1)]
)
def test_a_message_does_not_grow_with_the_world(size: int, buckets: int, told: int) -> None:
    assert row_width(size, buckets) == ARRIVALS + told


@pytest.mark.parametrize(
    ("buckets", "room", "windows"),
    [
        (3, 3, [[0, 1, 2]] * 4),
        (3, 8, [[0, 1, 2]] * 4),
        (5, 3, [[0, 1, 4], [2, 3, 4], [0, 1, 4], [2, 3, 4]]),
        (6, 3, [[0, 1, 5], [2, 3, 5], [0, 4, 5], [1, 2, 5]]),
        (6, 1, [[5]] * 4),
        (1, 1, [[0]] * 4),
        (0, 2, [[]] * 4),
    ],
)
def test_the_window_moves_on_and_holds_the_last_bucket(buckets: int, room: int, windows: list[list[int]]) -> None:
    assert [told_buckets(buckets, ARRIVALS + room, number) for number in range(4)] == windows


def test_a_row() -> None:
    # The second bucket was complete before the first: this rank arrived at it when the first was.
    step = Step(
        number=0,
        begun=110,
        computed=140,
        ended=150,
        ready=[130, 120, 135],
        times=[None] * 3,
        control=(111, 118),
        forward=(100, 109),
    )
    assert row_of(step, ARRIVALS + 3).tolist() == [100, 110, 111, 118, 130, 130, 135]
    assert row_of(step, ARRIVALS + 2).tolist() == [100, 110, 111, 118, 130, 135]
    bare = Step(number=0, begun=110, computed=140, ended=150, ready=[130], times=[None])
    # A plan of more buckets follows: the row is wider than what there is to tell.
    assert row_of(bare, ARRIVALS + 3).tolist() == [0, 110, 0, 0, 130, 0, 0]
    assert row_of(None, ARRIVALS + 1).tolist() == [0] * 5
