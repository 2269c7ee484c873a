"""Jobs are evaluated rightly, and a job that is killed somewhere ends as if nothing had been."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_train import Ended, Undisturbed, evaluate, samples_wrong
from benchmarks.chaos_worker import SAMPLES
from benchmarks.jobs import repeated, that_count


def notes(start: int, first: int, last: int, size: int = 2) -> list[dict[str, Any]]:
    """Of steps first to last: 3 steps an epoch, dealt to `size` ranks."""
    results = []
    for step in range(first, last + 1):
        ids = list(range(step % 3 * SAMPLES // 3, (step % 3 + 1) * SAMPLES // 3))
        for rank in range(size):
            mine = ids[rank::size]
            results.append(
                {"start": start, "size": size, "step": step, "epoch": step // 3, "ids": mine, "loss": 0.1 * len(mine)}
                | {"draws": [rank + step / 7]}
            )
    return results


STRAIGHT = notes(0, 0, 5)
REFERENCE = Undisturbed(2.0, [100, 20], "abc", that_count(STRAIGHT))


def ended(notes: list[dict[str, Any]], *digests: str) -> Ended:
    return Ended("", "", True, 2.0, 1, 1, notes, [{"sha256": digest} for digest in digests])


@pytest.mark.parametrize(
    ("found", "digests", "exactly", "wrong", "again"),
    [
        (STRAIGHT, ("abc", "abc"), True, "", 0),
        # killed after step 3, gone on from the checkpoint of step 2
        (notes(0, 0, 3) + notes(1, 2, 5), ("abc", "abc"), True, "", 2),
        # killed again before it came as far; one rank had noted what the other had not
        (notes(0, 0, 3)[:-1] + notes(1, 2, 2) + notes(100, 2, 5), ("abc", "abc"), True, "", 3),
        (notes(0, 0, 1) + notes(100, 2, 3, size=1) + notes(200, 4, 5, size=5), ("xyz", "xyz"), False, "", 0),
        (STRAIGHT, ("abc", "abd"), True, "other weights", 0),
        (STRAIGHT, ("xyz", "abc"), False, "the ranks' weights differ", 0),
        (notes(0, 0, 2) + notes(1, 4, 5), ("abc", "abc"), True, "steps [0, 1, 2, 4, 5], expected", 0),
        (notes(0, 0, 3)[:-1] + notes(1, 4, 5), ("abc", "abc"), True, "step 3 was noted by 1 of 2 ranks", 0),
    ],
)
def test_what_is_wrong_with_a_job(
    found: list[dict[str, Any]], digests: tuple[str, ...], exactly: bool, wrong: str, again: int
) -> None:
    found_wrong, repeats, _ = evaluate(ended(found, *digests), REFERENCE, exactly)
    assert found_wrong.startswith(wrong)
    assert bool(found_wrong) == bool(wrong)
    assert repeats == repeated(found) == again


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("ids", [0] * (SAMPLES // 6), "step 4 had samples"),
        ("draws", [0.5], "step 4 drew other random numbers"),
        ("loss", 2.6, "a loss differs by"),
    ],
)
def test_one_note_that_differs_is_found(name: str, value: Any, wrong: str) -> None:
    result = copy.deepcopy(STRAIGHT)
    assert result[8]["step"] == 4
    result[8][name] = value
    assert evaluate(ended(result, "abc", "abc"), REFERENCE, exactly=True)[0].startswith(wrong)


def test_samples_that_were_never_read_are_found_in_the_undisturbed_run_too() -> None:
    steps = that_count(notes(0, 0, 4))
    assert samples_wrong(steps, steps).startswith("epoch 1 lost [100, 101")


@pytest.mark.mpi
@pytest.mark.timeout(3600)
def test_nothing_is_lost(run_job: Callable[..., Any], count: Callable[[int, int], int], tmp_path: Path) -> None:
    kills, steps = count(1, 40), count(1, 8)
    outcome = tmp_path / "found.json"
    args = ["--kills", str(kills), "--moves", str(steps), "--json", str(outcome)]
    run_job([sys.executable, "-m", "benchmarks.chaos_train", *args], timeout=count(120, 3000), code=0)
    results = json.loads(outcome.read_text())["results"]
    assert sum(len(result) for result in results.values()) == kills + steps
    assert [one["wrong"] for result in results.values() for one in result] == [""] * (kills + steps)
