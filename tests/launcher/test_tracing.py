"""`--trace`: the ranks hear where to write, and what they wrote is merged when the job has ended, however it did."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import tracing

LAUNCH = [sys.executable, "-m", "launcher"]
TRAIN = """
import numpy as np
import ddp
model = ddp.DataParallel(ddp.nn.Linear(3, 2))
for step in range(5):
    model(ddp.from_numpy(np.ones((4, 3), np.float32))).sum().backward()
"""


@pytest.fixture
def trained(run_job: Any, script: Any, tmp_path: Path) -> Any:
    """Runs a script of these lines with a trace in the folder `t`. Merging takes an interpreter more."""

    def run(body: str, n: int) -> Any:
        options = ("--grace", "5", "--trace", "t", "-n", str(n))
        return run_job([*LAUNCH, *options, script(body)], timeout=100, cwd=tmp_path)

    return run


def test_the_folder_is_made_and_an_earlier_trace_in_it_removed(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert tracing.prepare(str(folder)) == str(folder)
    for name in ("rank-0.steps.json", "rank-11.steps.json", "trace.json", "step.png", "notes.json", "rank-x.json"):
        (folder / name).touch()
    tracing.prepare(str(folder))
    assert sorted(os.listdir(folder)) == ["notes.json", "rank-x.json"]


@pytest.mark.mpi
def test_a_rank_that_dies_leaves_no_part_and_the_others_are_merged(trained: Any, tmp_path: Path) -> None:
    # By then the other has come to its end, and waits there.
    body = "os.chdir('/')\n" + TRAIN + "if rank == 1: time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\n"
    done = trained(body, n=2)
    assert done.returncode == 137
    failure, last = done.stderr.splitlines()
    assert "rank 1" in failure
    assert "killed by SIGKILL" in failure
    assert last.startswith(
        f"ddp-launch: trace of 1 rank, 5 steps: {tmp_path}/t/trace.json (open it at ui.perfetto.dev)"
    )
    assert last.endswith("; rank 1 left no part")
    events = json.loads((tmp_path / "t" / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X" and event["name"] == "backward"]) == 5
