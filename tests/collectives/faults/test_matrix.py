"""Whatever one rank does wrong, in whichever collective: the job ends in time, and says who did what."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.collectives.faults.matrix import BARE, BARE_SAMPLE, OUTCOMES, PAIRS, SAMPLE, pattern, ranks
from tests.conftest import Run

RANK = str(Path(__file__).with_name("rank.py"))
# A loaded machine may be slow to start ranks, and to tell us that they have ended.
START, LOADED = 60.0, 4.0


def sampled(pairs: Iterable[tuple[str, str]], sample: Sequence[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*pair, marks=[] if pair in sample else pytest.mark.long) for pair in pairs]


def check(start: list[str], run_job: Run, fault: str, name: str, says: str | None) -> None:
    """Fails if the job does not end as it should. says: None where it says nothing and exits with 0"""
    outcome = OUTCOMES[fault]
    done = run_job([*start, RANK, fault, name], timeout=START)
    ended = time.time()
    output = done.stdout + done.stderr
    began = re.search(r"at (\d+\.\d+)", done.stdout)
    assert began is not None, output
    assert ended - float(began[1]) < outcome.within + LOADED, output
    assert re.search(pattern(says or "", name), output), f"expected {pattern(says or '', name)}, got\n{output}"
    if outcome.code == 0:
        assert "Traceback" not in output
    if start[0] == sys.executable:
        assert done.returncode == outcome.code, output
    elif says is not None:
        assert (done.returncode == 0) == (outcome.code == 0), output


@pytest.mark.mpi
@pytest.mark.parametrize(("fault", "name"), sampled(PAIRS, SAMPLE))
def test_a_fault_ends_the_job_in_time_and_is_named(run_job: Run, fault: str, name: str) -> None:
    start = [sys.executable, "-m", "launcher", "-n", str(ranks(name))]
    check(start, run_job, fault, name, OUTCOMES[fault].says)


@pytest.mark.mpi
@pytest.mark.parametrize(("fault", "name"), sampled(BARE, BARE_SAMPLE))
def test_a_fault_ends_the_job_of_a_bare_engine(run_job: Run, mpiexec: list[str], fault: str, name: str) -> None:
    check([*mpiexec, "-n", str(ranks(name)), sys.executable], run_job, fault, name, OUTCOMES[fault].bare)
