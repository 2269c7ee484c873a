"""What happens, for programs: whole JSON lines, in order, and a file that fails costs the job nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.console.events import Events, kind_of
from launcher.diagnosis.failures import EngineEnded, Failure, Hung, Raised, RankFailed
from launcher.errors import UsageError
from launcher.job import Job
from tests.conftest import ROOT

HEAD = ("time", "monotonic", "event", "attempt")


def start(path: object, console: Any) -> Events:
    return Events(Job(module="train", args=("--lr", "1"), n=2, events=str(path)), console, ["ddp-launch", "x"])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event(tmp_path: Path, console: Any) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"before"}\n')
    events = start(path, console)
    events.attempt_started(0, 2)
    events.rank_started(1, {"host": "node7", "pid": 4711, "local_rank": 1, "gpus": [1], "agent": 4710})
    events.debugging(frozenset({1, 0}))
    events.resumed(2.5)
    raised = Raised(type="ValueError", message="no", traceback="Traceback\n")
    events.failed(RankFailed(noticed_at=0.0, rank=1, pid=4711, raised=raised))
    events.failed(EngineEnded(noticed_at=0.0, pid=7, status=-9))
    events.failed(Hung(noticed_at=0.0, ranks=(1,), message="nothing moved"))
    events.rank_ended(0, 0)
    events.rank_ended(1, -9)
    events.attempt_started(1, 1)
    events.job_ended(1, "rank 1 raised ValueError: no")
    events.close()
    result = read(path)
    assert result.pop(0) == {"event": "before"}  # appended
    for event in result:
        assert tuple(event)[:4] == HEAD
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event.pop("time"))
        assert event.pop("monotonic") > 0
    assert result[0].pop("pid") == os.getpid()
    assert result[0].pop("cwd") == os.getcwd()
    assert result[0].pop("host")
    assert 0 <= result[-1].pop("seconds") < 10
    assert result == [
        {"event": "job_started", "attempt": 0, "command": ["ddp-launch", "x"], "target": ["-m", "train", "--lr", "1"], "n": 2, "engine": "auto"},  # noqa: E501  # one event a line
        {"event": "attempt_started", "attempt": 0, "n": 2},
        {"event": "rank_up", "attempt": 0, "rank": 1, "host": "node7", "pid": 4711, "local_rank": 1, "gpus": [1]},
        {"event": "debugging", "attempt": 0, "ranks": [0, 1]},
        {"event": "continued", "attempt": 0, "stopped_for": 2.5},
        {"event": "failure", "attempt": 0, "kind": "rank failed", "code": 1, "message": "rank 1 (pid 4711) raised ValueError: no", "rank": 1, "exception": "ValueError", "traceback": "Traceback\n"},  # noqa: E501
        {"event": "failure", "attempt": 0, "kind": "engine ended", "code": 137, "message": "mpiexec (pid 7) was killed by SIGKILL (signal 9) while ranks were running"},  # noqa: E501
        {"event": "hang", "attempt": 0, "ranks": [1], "message": "nothing moved"},
        {"event": "rank_ended", "attempt": 0, "rank": 0, "code": 0, "signal": None},
        {"event": "rank_ended", "attempt": 0, "rank": 1, "code": None, "signal": 9},
        {"event": "restart", "attempt": 1, "n": 1},
        {"event": "attempt_started", "attempt": 1, "n": 1},
        {"event": "job_ended", "attempt": 1, "code": 1, "message": "rank 1 raised ValueError: no"},
    ]  # fmt: skip
    assert console.lines == []


def test_every_kind_of_failure_is_in_the_docs_by_its_name() -> None:
    kinds = {kind_of(each) for each in Failure.__subclasses__()}
    docs = (ROOT / "docs/launcher.md").read_text()
    row = next(line for line in docs.splitlines() if line.startswith("| `failure` |"))
    assert {f"`{kind}`" for kind in kinds - {"hung"}} <= set(re.findall("`[a-z ]+`", row))


def test_a_file_that_fails_is_reported_once(console: Any) -> None:
    events = start("/dev/full", console)
    events.attempt_started(0, 2)
    events.job_ended(0, "")
    assert console.lines == [
        "ddp-launch: the events file /dev/full cannot be written (No space left on device): it ends here"
    ]


def test_a_pipe_without_a_reader_is_wrong_use(tmp_path: Path, console: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="the pipe has no reader"):
        start(tmp_path / "pipe", console)


def test_a_reader_that_does_not_keep_up_does_not_block(tmp_path: Path, console: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    events = start(tmp_path / "pipe", console)
    for _ in range(3000):
        events.rank_ended(0, 0)
    assert len(console.lines) == 1
    os.close(reader)
    events.close()
