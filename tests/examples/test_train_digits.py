"""The main job, as users start it, and its second form: the same losses on any number of ranks, and real accuracy."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

from collectives.world import STOPPED
from tests.conftest import ROOT, Run, wait_until

TRAIN = str(ROOT / "examples" / "train_digits.py")
RESUME = str(ROOT / "examples" / "resume_digits.py")
LAUNCH = [sys.executable, "-m", "launcher"]
# With several, idle BLAS threads would spin on the cores that other ranks need.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def losses(file: Path) -> list[float]:
    read = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["step"] for each in read] == list(range(len(read)))
    return [each["loss"] for each in read]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("batch_size", "ranks", "engine"),
    [
        # 6 steps an epoch, the last of 238: three ranks do not have as many each
        pytest.param("240", "3", False, id="uneven"),
        # 2 steps an epoch, the last of 2: of four ranks two have no sample at all
        pytest.param("1436", "4", False, id="ranks without samples", marks=pytest.mark.long),
        pytest.param("240", "2", True, id="mpiexec", marks=pytest.mark.long),
    ],
)
def test_every_step_agrees_between_one_rank_and_several(
    run_job: Run, mpiexec: Any, tmp_path: Path, batch_size: str, ranks: str, engine: bool
) -> None:
    several = [*mpiexec, "-n", ranks, sys.executable] if engine else [*LAUNCH, "-n", ranks]
    seen = []
    for start in ([sys.executable], several):
        metrics = tmp_path / f"{len(seen)}.jsonl"
        args = ["--dtype", "float64", "--seed", "3", "--epochs", "2", "--batch-size", batch_size]
        run_job([*start, RESUME, *args, "--metrics", str(metrics)], timeout=100, env=ONE_THREAD, code=0)
        seen.append(losses(metrics))
    alone, together = seen
    assert alone[-1] < alone[0]
    assert_allclose(together, alone, rtol=0, atol=1e-10)


@pytest.mark.long  # .ci/run starts the same script by the README's command, and looks at its accuracy
def test_one_rank_learns_the_digits_and_says_so(run_job: Run) -> None:
    done = run_job([sys.executable, TRAIN, "--epochs", "8"], timeout=100, env=ONE_THREAD, code=0)
    match = re.fullmatch(r"test accuracy ([\d.]+) % \(\d+ of 359\), 1 rank, [\d.]+ s\n", done.stdout)
    assert match, done.stdout
    assert float(match[1]) >= 95
    assert "184/184" in done.stderr  # the last line of progress
    assert " 0/184" not in done.stderr, "a bar is for terminals"


@pytest.mark.mpi
def test_a_job_that_was_asked_to_stop_goes_on_exactly_on_another_number_of_ranks(
    start_job: Any, run_job: Run, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    straight = tmp_path / "straight.jsonl"
    options = ["--dtype", "float64", "--batch-size", "240", "--every", "4"]
    saved = [*options, "--checkpoint", str(tmp_path / "saved"), "--metrics", str(metrics)]
    job = start_job([*LAUNCH, "-n", "2", RESUME, "--epochs", "999", *saved], env=ONE_THREAD)
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 60)
    job.process.send_signal(signal.SIGUSR1)
    done = job.wait(60, code=STOPPED)
    match = re.search(r"ddp-launch: stopped as asked at step (\d+), state saved", done.stderr)
    assert match, done.stderr
    epochs = ["--epochs", str(int(match[1]) // 6 + 1)]
    for more in (saved, [*options, "--metrics", str(straight)]):
        run_job([sys.executable, RESUME, *epochs, *more], env=ONE_THREAD, code=0)
    assert_allclose(losses(metrics), losses(straight), rtol=1e-10)
