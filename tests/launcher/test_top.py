"""`ddp-top`: a running job from outside, and what it says where there is none."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

from launcher import top
from launcher.console.status import running_jobs
from tests.conftest import wait_until
from tests.launcher.conftest import wait_for

TOP = [sys.executable, "-m", "launcher.top"]
FIGURES = {"step": 1200, "step/s": 25.312, "samples/s": 1620.44, "rss": 3 << 20}
RANKS = [
    {"rank": 0, "pid": 40, "where": "a.py:1 in f", **FIGURES},
    {"rank": 1, "where": "no\x1b[2Jnews", "loss": float("nan"), "device_bytes": 5e9, "reduced_bytes/s": 2048.5},
]


def test_a_line_a_rank() -> None:
    head, columns, *rows = top.describe_job({"pid": 39, "target": "a.py\x1b", "ranks": RANKS}).split("\n")
    assert head == "ddp-launch 39: a.py\\x1b"
    assert columns.split() == [*top._COLUMNS]
    first, second = (row.split(maxsplit=len(top._COLUMNS) + 1) for row in rows)
    assert first[:5] == ["0", "1200", "25.31", "1620", "-"]
    assert " ".join(first).endswith("3 MiB - - 40 - - - a.py:1 in f")
    assert second[:8] == ["1", "-", "-", "-", "nan", "-", "-", "2"]
    assert " ".join(second).endswith("KiB - 4.7 GiB - - - - - no\\x1b[2Jnews")
    assert top.describe_job({"pid": 39, "target": "a.py", "ranks": []}).count("\n") == 1


@pytest.mark.parametrize("args", [["4194305"], [str(os.getpid())], ["1"], ["x"], []])
def test_no_such_job_of_this_user(args: list[str], monkeypatch: Any, capsys: Any) -> None:
    job = {"pid": 7}
    monkeypatch.setattr(top, "running_jobs", lambda pid=None: running_jobs(pid) if pid else [job] * len(args))
    assert top.main(args) == 2
    said = f"{args[0]} is no running ddp-launch of yours; these are: 7" if args else "no ddp-launch of yours is running"
    assert capsys.readouterr().err == f"ddp-top: {said}\n"


def test_several_jobs_are_named(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(top, "running_jobs", lambda pid=None: [{"pid": 7}, {"pid": 9}])
    assert top.main([]) == 2
    assert capsys.readouterr().err.endswith("name one: 7, 9\n")


def test_a_job_is_watched_until_it_is_killed(start_launch: Any) -> None:
    running = start_launch("print('ready', flush=True); time.sleep(60)", n=1)
    pid = running.process.pid
    wait_until(lambda: any(result["ranks"] for result in running_jobs(pid)))
    assert pid in [job["pid"] for job in running_jobs()]
    done = subprocess.run([*TOP, str(pid)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    head, columns, row = done.stdout.splitlines()
    assert [head.split(":")[0], columns.split()[0], row.split()[0]] == [f"ddp-launch {pid}", "rank", "0"]
    for ends_by, code in (("Ctrl-C", -signal.SIGINT), ("the end of the job", 0)):
        screen, end = pty.openpty()
        with subprocess.Popen([*TOP, str(pid)], stdin=end, stdout=end, stderr=subprocess.PIPE) as process:
            os.close(end)
            wait_for(screen, "\x1b[H\x1b[Jddp-launch", 2, timeout=60)  # painted over at least once
            if ends_by == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            else:
                running.process.kill()
                wait_for(screen, "the job has ended", 1, timeout=60)
            assert process.communicate(timeout=60)[1] == b""
            assert process.returncode == code
        os.close(screen)
