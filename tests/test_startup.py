"""What the benchmark of launchers says can be wrong: that a job fails as it is meant to, and what is compared."""

from __future__ import annotations

import sys

import pytest

from benchmarks.jobs import processes
from benchmarks.startup import implementations, measure


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("matter", ["first", "exit", "killed", "restart", "memory"])
def test_ours_does_what_is_measured(matter: str, mpiexec: list[str]) -> None:
    assert 0 < measure(implementations(matter)["ddp-launch"], matter) < 60


def test_a_job_that_ends_otherwise_is_no_measurement() -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        measure([sys.executable, "-c", "raise SystemExit(3)"], "exit")
    assert processes("no such mark") == []
