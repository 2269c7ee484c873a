"""The main job, as users start it, and its second form: the same losses on any number of ranks, and real accuracy."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

from collectives.world import STOPPED
from tests.conftest import Run

ROOT = Path(__file__).parent.parent.parent
TRAIN = str(ROOT / "examples" / "train_digits.py")
RESUME = str(ROOT / "examples" / "resume_digits.py")


def losses(file: Path) -> list[float]:
    read = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["step"] for each in read] == list(range(len(read)))
    return [each["loss"] for each in read]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "together"),
    [
        # 6 steps an epoch, the last of 238: four ranks do not have as many each
        (["--epochs", "2", "--batch-size", "240"], ["ddp-launch -n 4", "mpiexec -n 2"]),
        # 2 steps an epoch, the last of 2: of four ranks two have no sample at all
        pytest.param(["--epochs", "2", "--batch-size", "1436"], ["ddp-launch -n 4"], marks=pytest.mark.long),
    ],
)
def test_every_step_agrees_between_1_2_and_4_ranks(
    run_job: Run, mpiexec: list[str], tmp_path: Path, options: list[str], together: list[str]
) -> None:
    starts = {
        "python": [sys.executable],
        "ddp-launch -n 4": [sys.executable, "-m", "launcher", "-n", "4"],
        "mpiexec -n 2": [*mpiexec, "-n", "2", sys.executable],
    }
    seen = {}
    for number, name in enumerate(["python", *together]):
        start = starts[name]
        metrics = tmp_path / f"{number}.jsonl"
        args = ["--dtype", "float64", "--seed", "3", "--metrics", str(metrics), *options]
        # One thread a rank: with several, idle BLAS threads would spin on the cores that other ranks need.
        done = run_job([*start, RESUME, *args], timeout=100, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        seen[name] = losses(metrics)
    alone = seen.pop("python")
    assert alone[-1] < alone[0]
    for name, theirs in seen.items():
        assert len(theirs) == len(alone)
        worst = max(abs(a - b) for a, b in zip(alone, theirs, strict=True))
        assert worst < 1e-10, f"{name}: {worst}"


@pytest.mark.long  # .ci/run starts the same script by the README's command, and looks at its accuracy
def test_one_rank_learns_the_digits_and_says_so(run_job: Run) -> None:
    done = run_job([sys.executable, TRAIN, "--epochs", "8"], timeout=100, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"test accuracy ([\d.]+) % \(\d+ of 359\), 1 rank, [\d.]+ s\n", done.stdout)
    assert match, done.stdout
    assert float(match[1]) >= 95
    assert "184/184" in done.stderr  # the last line of progress
    assert " 0/184" not in done.stderr, "a bar is for terminals"


@pytest.mark.mpi
def test_a_job_that_was_asked_to_stop_goes_on_exactly_on_another_number_of_ranks(
    start_job: Callable[..., Any], run_job: Run, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    straight = tmp_path / "straight.jsonl"
    options = ["--dtype", "float64", "--batch-size", "240", "--every", "4"]
    saved = [*options, "--checkpoint", str(tmp_path / "saved"), "--metrics", str(metrics)]
    env = {"OMP_NUM_THREADS": "1"}
    job = start_job([sys.executable, "-m", "launcher", "-n", "2", RESUME, "--epochs", "999", *saved], env=env)
    end = time.monotonic() + 60
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    job.process.send_signal(signal.SIGUSR1)
    done = job.wait(60)
    match = re.search(r"ddp-launch: stopped as asked at step (\d+), state saved", done.stderr)
    assert match, done.stderr
    assert done.returncode == STOPPED
    epochs = ["--epochs", str(int(match[1]) // 6 + 1)]
    assert run_job([sys.executable, RESUME, *epochs, *saved], env=env).returncode == 0
    assert run_job([sys.executable, RESUME, *epochs, *options, "--metrics", str(straight)], env=env).returncode == 0
    assert_allclose(losses(metrics), losses(straight), rtol=1e-10)
