"""Traces: parts written by each rank, merged on one clock, as events and as a picture."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import collectives
import ddp
import ddp.tracing
from collectives.communicator import Communicator
from ddp import nn
from ddp.errors import ArgumentError
from ddp.parallel import step_trace
from ddp.parallel.step_trace import Step
from ddp.tracing import merge
from ddp.tracing.__main__ import main
from ddp.tracing.chrome_trace import TracePart, read_parts, trace_events, typical_step
from ddp.tracing.step_picture import shown_ranks, title
from tests.ddp.parallel.steps import MS, Ranks, make_step


def make_part(rank: int, *models: list[Step], size: int = 2) -> TracePart:
    models = models or ([make_step(number, 100 * number, 5 * rank) for number in range(5)],)
    for steps in models:
        for before, step in pairwise(steps):
            step.since = before.ended
    tables = [{step.number: step for step in steps} for steps in models]
    return TracePart(rank=rank, size=size, host="here", job=1, models=tables)


def assert_valid(events: list[dict[str, Any]]) -> None:
    """Every event has what viewers need; slices of a row are nested or disjoint."""
    rows = defaultdict(list)
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            begin = round(1000 * event["ts"])  # ns, as it was
            length = round(1000 * event["dur"])
            rows[event["pid"], event["tid"]].append((begin, -begin - length))
    for spans in rows.values():
        for (_, end), (begin, later) in itertools.combinations(sorted(spans), 2):
            assert begin >= -end or later >= end


def slices(events: list[dict[str, Any]], rank: int, row: str) -> list[tuple[str, float, float]]:
    """Name, begin and duration in ms of the slices in the row of that name."""
    (tid,) = {e["tid"] for e in events if e["name"] == "thread_name" and (e["pid"], e["args"]["name"]) == (rank, row)}
    results = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, tid)]
    return [(event["name"], event["ts"] / 1000, event["dur"] / 1000) for event in results]


def test_events_of_two_ranks() -> None:
    events = trace_events([make_part(0), make_part(1)])
    assert_valid(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (here)" for rank in range(2)}
    # Time 0 is the first forward of all.
    assert slices(events, 0, "compute")[:6] == [
        ("forward", 0, 29),
        ("loss", 29, 1),
        ("backward", 30, 40),
        ("wait for communication", 70, 10),
        ("other: data, optimizer, logging", 80, 20),
        ("forward", 100, 29),
    ]
    assert slices(events, 1, "compute")[:1] == [("forward", 5, 29)]
    assert slices(events, 0, "control message")[0] == ("control message", 30, 10)
    assert ("waiting for rank 1", 40, 5) in slices(events, 0, "bucket 0")
    assert slices(events, 0, "bucket 0")[0] == ("bucket 0", 40, 20)
    assert slices(events, 1, "bucket 0")[0] == ("bucket 0", 45, 15)
    bucket = next(event for event in events if event["name"] == "bucket 1" and event["ph"] == "X")
    assert bucket["args"] == {"step": 0, "MiB": 2.0, "parameters": ("first", "second")}
    ready = [event["ts"] / 1000 for event in events if event["ph"] == "i" and event["pid"] == 0]
    assert ready[:2] == [40, 70]


def test_steps_with_less_information_and_several_models() -> None:
    bare = [make_step(0, 0, forward=None, control=None, times=[None, None]), make_step(1, 100, forward=None)]
    # This forward began before the backward before it had ended, as with two losses of one model.
    early = make_step(2, 200, forward=(190 * MS, 230 * MS))
    before = make_step(3, 300, forward=(260 * MS, 280 * MS))
    steps = [*bare, early, before]
    events = trace_events([make_part(0, steps, steps, size=1)])
    assert_valid(events)
    assert [name for name, _, _ in slices(events, 0, "model 0: compute")] == [
        *("backward", "wait for communication"),
        *("other: data, optimizer, logging", "backward", "wait for communication"),
        *("forward", "loss", "backward", "wait for communication"),
        *("loss", "backward", "wait for communication"),
    ]
    assert slices(events, 0, "model 0: compute") == slices(events, 0, "model 1: compute")


def test_a_bucket_waits_for_a_rank_only_where_all_ranks_have_the_step() -> None:
    parts = [make_part(0), make_part(1, [make_step(3, 300, late=5), make_step(9, 900)])]
    assert [e["args"] for e in trace_events(parts) if e["name"].startswith("waiting")] == [{"step": 3, "rank": 1}] * 2
    alone = [make_part(0, size=3), make_part(1, size=3)]  # rank 2 left no part, and may have been later
    assert not [event for event in trace_events(alone) if event["name"].startswith("waiting")]


def test_typical_step_is_of_median_length_and_its_title_has_the_numbers() -> None:
    for steps in ([make_step(0, 0)], []):
        assert typical_step([make_part(0, steps)]) is None
    steps = [make_step(number, 100 * number) for number in range(9)]
    for place, longer in ((5, 30), (6, 2), (7, 50)):  # the lengths are 130, 72, 148, 50 then
        steps[place].ended += longer * MS
    assert typical_step([make_part(0, steps, size=1)]) == (4, 9)
    parts = [make_part(0, steps), make_part(1)]
    assert typical_step(parts) == (4, 5)
    assert title(4, 5, {part.rank: part.models[0][4] for part in parts}) == (
        "Step 4, typical of 5: 100.0 ms. Rank 0: waited 10.0 ms after backward\n"
        "last to complete its gradients: rank 1, 5.0 ms after the others"
    )
    assert shown_ranks(range(20), [17, 9]) == [0, 1, 2, 3, 9, 17]


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DDP_TRACE", raising=False)
    yield
    assert not step_trace._active


def record(folder: Path, size: int = 2, steps: int = 8, ahead: int = 0) -> None:
    """What `size` ranks leave there, each on a node of its own, whose clock is `ahead` ns of the one before."""
    started = step_trace.Recorder(str(folder))
    ranks = Ranks(size, nodes=list(range(size)))
    for number in range(steps):
        ranks.run(*(make_step(number, 100 * number, 4 * rank, ahead * rank) for rank in range(size)))
    started.stop()


@pytest.mark.usefixtures("_no_environment")
def test_parts_of_shifted_clocks_are_merged_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    record(tmp_path, ahead=10**15)
    line = f"trace of 2 ranks, 8 steps: {tmp_path}/trace.json (open it at ui.perfetto.dev)"
    assert merge(tmp_path) == f"{line}, {tmp_path}/step.png"
    picture = tmp_path / "step.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert_valid(events)
    assert slices(events, 1, "compute")[0] == ("forward", 4, 29)
    assert sorted(os.listdir(tmp_path)) == ["rank-0.steps.json", "rank-1.steps.json", "step.png", "trace.json"]
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    missing = "; no picture of a step, for matplotlib is not installed (pip install matplotlib)"
    assert merge(tmp_path) == line + missing
    assert not picture.exists()


@pytest.mark.usefixtures("_no_environment")
def test_missing_parts_and_parts_of_an_older_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        assert main([str(tmp_path)]) == 1
        return capsys.readouterr().err

    assert "no rank has written a part" in refused()
    assert main([]) == main(["--help"]) == 2
    assert "usage" in capsys.readouterr().err
    record(tmp_path, size=3)
    path = tmp_path / "rank-1.steps.json"
    path.unlink()
    assert main([str(tmp_path)]) == 0
    line = capsys.readouterr().out
    assert "trace of 2 ranks, 8 steps" in line
    assert line.endswith("; rank 1 left no part\n")
    record(tmp_path, steps=2)
    assert [(part.rank, part.size) for part in read_parts(tmp_path)] == [(0, 2), (1, 2)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "job": 255}))
    words = f"the parts in {tmp_path} are of several jobs (rank 0 of job 1, rank 1 of job ff): keep those of one"
    assert refused() == f"ddp.tracing: {words}\n"
    path.write_text('{"format":"another"}')
    assert "rank-1.steps.json is no part of a trace that this version can read" in refused()


@pytest.mark.usefixtures("_no_environment")
def test_a_clock_that_is_set_back_loses_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(time.time(), -86_400)  # s; a day earlier each time
    monkeypatch.setattr(time, "time", lambda: next(clock))
    record(tmp_path)
    assert [part.rank for part in read_parts(tmp_path)] == [0, 1]


@pytest.mark.usefixtures("_no_environment")
def test_recording_real_ranks(tmp_path: Path) -> None:
    def train(_: Communicator) -> list[Any]:
        ddp.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model = ddp.DataParallel(net, bucket_cap_mb=0.0001)
        for step in range(4):
            model(ddp.full((2, 4), 1.0 + step)).sum().backward()
        model.close()
        return [p.grad.tolist() for p in net.parameters()]

    plain = collectives.run_threads(train, 2)
    jobs = []
    for _ in range(2):
        with ddp.tracing.recording(tmp_path):
            with pytest.raises(ArgumentError, match=f"recorded to {tmp_path} already"):
                ddp.tracing.start(tmp_path)
            assert collectives.run_threads(train, 2) == plain
        jobs += {part.job for part in read_parts(tmp_path)}
    assert len(set(jobs)) == len(jobs) == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert_valid(events)
    for rank in range(2):
        names = [name for name, _, _ in slices(events, rank, "compute")]
        assert [names.count(name) for name in ("forward", "backward", "wait for communication")] == [4, 4, 4]
    assert {tuple(event["args"]["parameters"]) for event in events if event["ph"] == "i"} >= {("2.weight",)}
    with pytest.raises(ArgumentError, match="no trace is being recorded"):
        ddp.tracing.stop()


@pytest.mark.usefixtures("_no_environment")
def test_recording_ends_when_the_block_raises_and_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ddp.tracing.recording(tmp_path / "new" / "folder"):
        raise ZeroDivisionError
    assert list((tmp_path / "new" / "folder").iterdir()) == []  # no model was wrapped
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be made: Not a directory"):
        ddp.tracing.start(tmp_path / "file" / "below")
    record(tmp_path, size=1, steps=1100)  # of which the latest 1,000 are kept
    (part,) = read_parts(tmp_path)
    assert list(part.models[0]) == list(range(100, 1100))


def test_the_environment_starts_a_trace(tmp_path: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, ddp\n"
        "model = ddp.DataParallel(ddp.nn.Linear(2, 1))\n"
        "for _ in range(3): model(ddp.ones(4, 2)).sum().backward()\n"
        "sys.exit(7)\n"
    )
    trace = tmp_path / "trace"
    done = run_job([sys.executable, "-c", script], env={"DDP_TRACE": str(trace)})
    assert (done.returncode, done.stderr) == (7, "")
    assert os.listdir(trace) == ["rank-0.steps.json"]
    monkeypatch.setenv("DDP_TRACE", str(trace / "rank-0.steps.json"))
    monkeypatch.setattr(step_trace, "_environment_read", False)
    with pytest.raises(ArgumentError, match="the trace's folder"):
        ddp.DataParallel(nn.Linear(2, 1))
