"""Log files: everything of every rank, whole lines, a folder a run; a disk that fails costs lines and not the job."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.console.logs import Logs
from launcher.diagnosis.failures import Raised, RankFailed
from launcher.errors import UsageError


def start(folder: Path, console: Any) -> Logs:
    logs = Logs(str(folder), console, ["ddp-launch", "-n", "2", "my train.py"])
    logs.attempt_started(0, 2)
    return logs


def test_a_run_has_a_folder_and_every_rank_a_file(tmp_path: Path, console: Any) -> None:
    logs = start(tmp_path / "deep" / "logs", console)
    logs.rank_started(1, {})
    logs.output(0, "out", b"one\ntw")
    logs.output(0, "err", b"\r10%")
    logs.output(0, "out", b"o\n")
    logs.output(0, "err", b"\r20%\nwarning")
    raised = Raised(type="ValueError", message="no", traceback="Traceback ...\nValueError: no\n")
    logs.failed(RankFailed(noticed_at=0.0, rank=0, pid=7, raised=raised))
    logs.rank_ended(0, 1)
    console.say("rank 0 raised ValueError: no")
    logs.job_ended(1, "rank 0 raised ValueError: no")
    logs.close()
    folder = logs.folder
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d_{os.getpid()}", folder.name)
    assert (tmp_path / "deep/logs/latest").resolve() == folder.resolve()
    traceback = "Traceback ...\nValueError: no\n"
    assert (folder / "rank-0.log").read_text() == f"one\ntwo\n20%\n{traceback}warning\n"
    assert (folder / "rank-1.log").read_text() == ""
    lines = [line[20:] for line in (folder / "launcher.log").read_text().splitlines()]
    failure = "rank 0 raised ValueError: no"
    assert lines == ["ddp-launch -n 2 'my train.py'", f"ddp-launch: {failure}", f"exit code 1: {failure}"]
    assert console.lines == [f"ddp-launch: {failure}"]


def test_a_restart_has_a_folder_below(tmp_path: Path, console: Any) -> None:
    logs = start(tmp_path, console)
    logs.output(1, "out", b"first, unfinished")
    run = logs.folder
    logs.attempt_started(1, 2)
    logs.output(1, "out", b"second\n")
    logs.close()
    assert logs.folder == run / "attempt-1"
    assert (run / "rank-1.log").read_text() == "first, unfinished\n"
    assert (run / "attempt-1/rank-1.log").read_text() == "second\n"


def test_the_link_follows_the_last_run(tmp_path: Path, console: Any) -> None:
    first = start(tmp_path, console)
    second = start(tmp_path, console)
    assert first.folder != second.folder
    assert os.readlink(tmp_path / "latest") == second.folder.name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first.folder.name, second.folder.name, "latest"])


def test_what_cannot_be_a_log_folder(tmp_path: Path, console: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/logs cannot be used: Not a directory"):
        start(tmp_path / "file" / "logs", console)
    (tmp_path / "taken" / "latest").mkdir(parents=True)
    with pytest.raises(UsageError, match="no link to a run"):
        start(tmp_path / "taken", console)


def test_a_full_disk_or_a_folder_that_is_removed_is_reported_once(tmp_path: Path, console: Any) -> None:
    logs = start(tmp_path, console)
    for rank in (0, 1):
        (logs.folder / f"rank-{rank}.log").symlink_to("/dev/full")
        for _ in range(3):
            logs.output(rank, "out", b"line\n")
    logs.close()
    assert len(console.lines) == 1
    assert "cannot be written (No space left on device): lines are missing there" in console.lines[0]
    logs = start(tmp_path, console)
    shutil.rmtree(logs.folder)
    logs.output(0, "out", b"line\n")
    logs.job_ended(0, "")
    logs.close()
    assert ["No such file" in text for text in console.lines] == [False, True]
