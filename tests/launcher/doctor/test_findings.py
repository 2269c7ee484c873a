"""What follows from findings, how they are shown, and how a process is asked that may not live to answer."""

from __future__ import annotations

import subprocess
import time

import pytest

from launcher.doctor import findings as report
from launcher.doctor.findings import Finding, error, note, ok, verdict, warning
from launcher.doctor.probes import MARK, Answer, parse_answer, started

GOOD = ok("a", check="mpi")
SLOW = warning("b", "fix it", "gpu")
BAD = error("c", "fix that", "mpi")


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        ([GOOD, note("x")], "this machine can train"),
        ([GOOD, SLOW], "this machine can train (1 warning)"),
        ([BAD, BAD, SLOW], "training would fail: 2 errors, 1 warning"),
    ],
)
def test_the_verdict(findings: list[Finding], sentence: str) -> None:
    assert verdict(findings) == sentence


def test_lines_are_aligned_and_a_check_is_named_once() -> None:
    assert report.lines([GOOD, error("c\nits story", "fix that", "mpi"), SLOW], colour=False) == [
        "mpi      ok       a",
        "         error    c",
        "                    its story",
        "                  fix: fix that",
        "gpu      warning  b",
        "                  fix: fix it",
    ]


@pytest.mark.parametrize(
    ("lines", "status", "answer"),
    [
        # A launcher puts the rank in front, and libraries print what they like.
        (["hello", f"0: {MARK}[2]", "bye"], 3, Answer([2], "", ("hello", "bye"), 3)),
        ([f"{MARK}{{"], 0, Answer(None, "the process printed nothing, exit status 0", (), 0)),
        (["Traceback", "ImportError: no"], 1, Answer(None, "ImportError: no", ("Traceback", "ImportError: no"), 1)),
        (["ImportError: no"], -11, Answer(None, "the process died of SIGSEGV", ("ImportError: no",), -11)),
        ([], None, Answer(None, "the process had not ended after 20 s", (), None)),
    ],
)
def test_what_a_process_answered(lines: list[str], status: int | None, answer: Answer) -> None:
    assert parse_answer(lines, status, 20.0) == answer


def test_a_process_that_hangs_is_ended_with_its_children() -> None:
    start = time.monotonic()
    with started(["/bin/sh", "-c", "echo hi; sleep 77.25; true"], {}) as answer:
        assert answer(1.0) == Answer(None, "the process had not ended after 1 s", ("hi",), None)
    while subprocess.run(["pgrep", "-f", "^sleep 77.25"], capture_output=True).stdout:
        assert time.monotonic() - start < 10
