"""The plan of the test of resizes and kills, what it makes of notes, and a short run of it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_elastic import BETWEEN, MOST, Event, Recovery, host_events, pauses, plan, samples_of, seconds_of
from benchmarks.jobs import Notes, repeated, starts_of


def test_events_follow_from_the_seed_and_fit_the_job() -> None:
    events = plan(50, random.Random(3))
    assert events == plan(50, random.Random(3))
    ranks = 2
    for before, event in zip([None, *events], events, strict=False):
        assert BETWEEN <= event.step - (before.step if before else 0) < 2 * BETWEEN
        assert 1 <= event.ranks <= MOST
        assert (event.ranks != ranks) if event.rank is None else (event.ranks, event.rank < ranks) == (ranks, True)
        ranks = event.ranks
    assert {event.kind for event in events} == {"kill", "agent", "resize"}
    loss, back = host_events(random.Random(3))
    assert ((loss.kind, loss.rank), (back.kind, back.rank)) == (("host", 1), ("return", None))
    assert BETWEEN <= back.step - loss.step < 2 * BETWEEN


def test_pauses_of_the_launcher_are_taken_off() -> None:
    kinds = ["kill", "agent", "kill", "resize", "agent"]
    events = [Event(kind, 15, 2, None if kind == "resize" else 1) for kind in kinds]
    assert pauses(events) == [0.0, 1.0, 2.0, 0.0, 0.0]
    assert seconds_of([Recovery(Event("kill", 17, 1, 0), 2.5, 1.0)]) == {"kill": [1.5]}


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
    assert repeated(NOTES) == 1


def test_notes_are_read_on_in_whole_lines(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    assert notes.all() == []
    with (tmp_path / "rank-0.jsonl").open("w", buffering=1) as file:
        file.write('{"step": 1}\n{"st')
        file.flush()
        assert notes.all() == [{"step": 1}]
        file.write('ep": 2}\n')
    assert notes.all() == [{"step": 1}, {"step": 2}]


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_job_that_is_resized_ends_with_the_same_bits(run_job: Callable[..., Any], tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    # A resize to three ranks, and the deaths of an agent and of a rank.
    args = ["--elastic", "--events", "3", "--torchruns", "0", "--seed", "7", "--json", str(result)]
    run_job([sys.executable, "-m", "benchmarks.chaos_train", *args], timeout=300, code=0)
    results = json.loads(result.read_text())
    assert results["wrong"] == ""
    assert {kind: len(seconds) for kind, seconds in results["seconds"].items()} == {"kill": 1, "agent": 1, "resize": 1}
    assert results["repeated"]["one machine"] <= 2
