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
    """Runs a script of these lines with a trace in the folder `t`. Merging takes an interpreter and matplotlib more."""

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
def test_two_ranks_on_one_clock(trained: Any, tmp_path: Path) -> None:
    done = trained("os.chdir('/')\n" + TRAIN, n=2)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        f"ddp-launch: trace of 2 ranks, 5 steps: {tmp_path}/t/trace.json (open it at ui.perfetto.dev), "
        f"{tmp_path}/t/step.png\n"
    )
    events = json.loads((tmp_path / "t" / "trace.json").read_text())["traceEvents"]
    backward = {
        (event["pid"], event["args"]["step"]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["name"] == "backward"
    }
    assert len(backward) == 10
    # A bucket is done when all ranks have launched it: on one clock, no rank is done before the other has launched.
    buckets: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"] == "bucket 0":
            buckets.setdefault(event["args"]["step"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(buckets) == 5
    for spans in buckets.values():
        assert len(spans) == 2
        assert max(begin for begin, _ in spans) <= min(end for _, end in spans)


@pytest.mark.mpi
def test_a_rank_that_dies_leaves_no_part_and_the_others_are_merged(trained: Any, tmp_path: Path) -> None:
    # By then the other has come to its end, and waits there.
    body = TRAIN + "if rank == 1: time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\n"
    done = trained(body, n=2)
    assert done.returncode == 137
    lines = done.stderr.splitlines()
    assert "rank 1" in lines[-2]
    assert "killed by SIGKILL" in lines[-2]
    assert lines[-1].startswith("ddp-launch: trace of 1 rank, 5 steps: ")
    assert lines[-1].endswith("; rank 1 left no part")
