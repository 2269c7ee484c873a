"""What the benchmark of launchers says can be wrong: that a job fails as it is meant to, and what is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.startup import enters, implementations, measure, processes, ratio


def test_a_ratio_is_taken_within_each_round_to_the_better_torchrun() -> None:
    rounds = {"ours": [1.0, 1.0, 4.0], "torchrun": [5.0, 9.0, 10.0], "torchrun --standalone": [9.0, 8.0, 9.0]}
    assert ratio(rounds, "ours") == 0.2
    assert ratio({"ours": [1.0]}, "ours") is None


def test_who_hangs_when_a_rank_dies_is_not_asked() -> None:
    assert not enters("mpiexec + mpi4py", "killed")
    assert not enters("mpiexec + collectives", "restart")
    assert enters("ddp-launch", "restart")


@pytest.mark.mpi
@pytest.mark.parametrize("matter", ["first", "exit", "killed", "restart", "memory"])
def test_ours_does_what_is_measured(matter: str, tmp_path: Path, mpiexec: list[str]) -> None:
    assert 0 < measure(implementations(tmp_path)["ddp-launch"], matter) < 60


@pytest.mark.mpi
def test_a_job_that_ends_otherwise_is_no_measurement(tmp_path: Path, mpiexec: list[str]) -> None:
    command = implementations(tmp_path)["ddp-launch"]
    (tmp_path / "ours.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ended with 3"):
        measure(command, "exit")
    assert processes("no such mark") == []
