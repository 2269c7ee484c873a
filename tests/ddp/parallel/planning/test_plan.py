"""The bucket plan, the value that holds it, and the control message, as tables."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from ddp.errors import ParallelError
from ddp.parallel.control import ControlMessage
from ddp.parallel.planning.choosing import Forecast, Link
from ddp.parallel.planning.plan import Plan, plan_buckets


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


def test_an_order_of_arrival_takes_the_place_of_reversed_model_order() -> None:
    assert plan_buckets([4, 4, 4, 4], cap=8, order=[1, 3, 0, 2]) == [[1, 3], [0, 2]]
    assert plan_buckets([4, 4, 4], cap=100, kinds="aba", order=[0, 1, 2]) == [[1], [0, 2]]


def test_the_control_message_sums_weights_and_uses_and_keeps_each_ranks_row_apart() -> None:
    def rank(comm: Communicator) -> Any:
        message = ControlMessage(comm, 3, 2)
        weight, used = (5.0, [True, True, False]) if comm.rank == 0 else (0.0, [True, False, False])
        message.send(weight, used, checksum=10.0 + comm.rank, marks=np.array([comm.rank, 7.0]))
        message.wait()
        assert message.done()
        rows = message.checksums().tolist(), message.marks().tolist()
        return message.scale(), message.weighted_ranks(), message.absent_ranks(), message.used(), rows

    expected = 1 / 5, 2, 0, [True, True, False], ([10, 11], [[0, 7], [1, 7]])
    assert collectives.run_threads(rank, 2) == [expected, expected]


def test_without_weights_the_scale_is_one_over_the_ranks() -> None:
    def rank(comm: Communicator) -> Any:
        message = ControlMessage(comm, 1, 0)
        message.send(None, [True])
        message.wait()
        first = message.scale(), message.weighted_ranks()
        message.send(0.0, [False])
        message.wait()
        return *first, message.scale()

    assert collectives.run_threads(rank, 4) == [(0.25, 0, 0.0)] * 4


def test_a_rank_without_data_counts_with_the_weight_that_is_said_and_has_given_none() -> None:
    def rank(comm: Communicator) -> Any:
        message = ControlMessage(comm, 1, 0)
        if comm.rank == 0:
            message.send(8.0, [True])
        else:
            message.send(0.0, [False], absent=True)
        message.wait()
        return message.scale(), message.weighted_ranks(), message.absent_ranks()

    assert collectives.run_threads(rank, 2) == [(1 / 8, 1, 1)] * 2


PLAN = Plan(buckets=(("b", "a"), ("c",)), nbytes=(1 << 20, 1 << 19), origin="in reversed model order")


def test_a_plan_is_a_json_value_and_back() -> None:
    assert Plan.from_state(json.loads(json.dumps(PLAN.state()))) == PLAN
    for wrong in ({}, {"buckets": [["a"]], "nbytes": [], "from": ""}, {"buckets": [[]], "nbytes": [1], "from": ""}):
        with pytest.raises(ParallelError, match="plan"):
            Plan.from_state(wrong)


def test_a_plan_prints_as_a_table() -> None:
    assert str(PLAN).splitlines() == [
        "2 buckets, 1.50 MiB, in reversed model order",
        "bucket      MiB gradients  first ... last",
        "     0     1.00         2  b ... a",
        "     1     0.50         1  c",
    ]
    ahead = Forecast(launched=(0.001, 0.002), done=(0.002, 0.004), backward=0.003, end=0.004, exposed=0.001)
    measured = dataclasses.replace(PLAN, link=Link(alpha=1e-4, beta=1e-8), forecast=ahead)
    assert str(measured).splitlines()[2:] == [
        "     0     1.00         2      1.00      2.00      b ... a",
        "     1     0.50         1      2.00      4.00      c",
        "predicted: backward 3.00 ms, all reduced after 4.00 ms, 1.00 ms of it exposed",
        "measured: 100 us a call, 100 MB/s reduced",
    ]
