"""The bucket plan and the control message, as tables."""

from __future__ import annotations

import pytest

from ddp.parallel.control import ControlMessage
from ddp.parallel.plan import plan_buckets


@pytest.mark.parametrize(
    ("nbytes", "options", "plan"),
    [
        ([4, 4, 8], {"cap": 8}, [[2], [1, 0]]),
        ([], {"cap": 8}, []),
        ([1], {"cap": 8}, [[0]]),
        ([1, 1, 1], {"cap": 8}, [[2, 1, 0]]),
        # One that is larger than the cap has a bucket to itself, and nothing is split.
        ([4, 100, 4], {"cap": 8}, [[2], [1], [0]]),
        # The first bucket is small, so that communication starts early.
        ([4, 4, 4, 4], {"cap": 8, "first": 4}, [[3], [2, 1], [0]]),
        ([4, 4, 4], {"cap": 8, "first": 1}, [[2], [1, 0]]),
        # Kinds never share a bucket; a bucket's turn comes when its last gradient does.
        ([4, 4, 4, 4], {"cap": 8, "kinds": "abab"}, [[3, 1], [2, 0]]),
        ([4, 4, 4, 4], {"cap": 8, "kinds": "abbb"}, [[3, 2], [1], [0]]),
        ([4, 4, 4], {"cap": 100, "kinds": "aba"}, [[1], [2, 0]]),
        ([0, 0], {"cap": 8}, [[1, 0]]),
    ],
)
def test_plan(nbytes: list[int], options: dict[str, object], plan: list[list[int]]) -> None:
    assert plan_buckets(nbytes, **options) == plan


def test_control_message_is_a_row_of_numbers_that_can_be_summed() -> None:
    first, second = ControlMessage(3), ControlMessage(3)
    first.fill(5.0, [True, True, False])
    second.fill(0.0, [True, False, False])
    assert first.array.tolist() == [5, 1, 1, 1, 0]
    first.array += second.array
    assert first.scale() == 1 / 5
    assert first.weighted_ranks() == 2
    assert first.used() == [True, True, False]


def test_without_weights_the_scale_is_one_over_the_ranks() -> None:
    message = ControlMessage(1)
    message.fill(None, [True])
    message.array *= 4
    assert (message.scale(), message.weighted_ranks()) == (0.25, 0)
    message.fill(0.0, [False])
    assert message.scale() == 0.0
