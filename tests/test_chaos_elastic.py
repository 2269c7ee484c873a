"""The plan of the test of resizes and kills, what it makes of notes, and a short run of it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_elastic import BETWEEN, MOST, plan, samples_of, starts_of, table


def test_events_follow_from_the_seed_and_fit_the_job() -> None:
    events = plan(50, random.Random(3))
    assert events == plan(50, random.Random(3))
    ranks = 2
    for before, event in zip([None, *events], events, strict=False):
        assert BETWEEN <= event.step - (before.step if before else 0) < 2 * BETWEEN
        assert 1 <= event.ranks <= MOST
        assert (event.ranks != ranks) if event.rank is None else (event.ranks, event.rank < ranks) == (ranks, True)
        ranks = event.ranks
    assert {event.kind for event in events} == {"kill", "resize"}


NOTES = [
    {"start": start, "size": size, "step": step, "time": float(time), "ids": [2 * step + rank]}
    for start, size, rank, step, time in (
        (0, 1, 0, 1, 1),
        (0, 1, 0, 2, 2),
        (1, 2, 0, 2, 4),
        (1, 2, 1, 2, 5),
        (1, 2, 0, 3, 6),
    )
]


def test_a_step_counts_as_its_last_start_made_it_and_ends_when_all_ranks_have() -> None:
    assert starts_of(NOTES) == {0: {1: 1.0, 2: 2.0}, 1: {2: 5.0}}
    assert samples_of(NOTES) == {1: [2], 2: [4, 5], 3: [6]}


def test_pauses_of_the_launcher_are_shown_and_not_counted() -> None:
    row = {"kind": "kill", "step": 17, "ranks": 1, "rank": 0, "recovery": 2.5, "pause": 1.0}
    assert table([row]).splitlines()[1:] == [
        "kill                  17             1          2.50             1",
        "1 times kill, without pauses: 1.50 s (median), 1.50 s (longest)",
    ]


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_job_that_is_resized_ends_with_the_same_bits(run_job: Callable[..., Any], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    args = ["--elastic", "--events", "2", "--seed", "1", "--json", str(found)]  # a resize to one rank, and its kill
    done = run_job([sys.executable, "-m", "benchmarks.chaos_train", *args], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(found.read_text())
    assert (results["wrong"], len({*results["sha256"].values()})) == ("", 1)
    assert [event["kind"] for event in results["events"]] == ["resize", "kill"]
