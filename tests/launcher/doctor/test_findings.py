"""What follows from findings, how they are shown, and how a process is asked that may not live to answer."""

from __future__ import annotations

import json
import sys
import time

import pytest

from launcher.doctor import findings as report
from launcher.doctor.findings import Finding, error, exit_code, note, ok, verdict, warning
from launcher.doctor.probes import MARK, Answer, run, understand

GOOD, SLOW, BAD = ok("mpi", "a"), warning("gpu", "b", "fix it"), error("mpi", "c", "fix that")


@pytest.mark.parametrize(
    ("findings", "sentence", "code"),
    [
        ([], "this machine can train", 0),
        ([GOOD, note("gpu", "x")], "this machine can train", 0),
        ([GOOD, SLOW], "this machine can train (1 warning)", 0),
        ([SLOW, SLOW], "this machine can train (2 warnings)", 0),
        ([BAD, GOOD], "training would fail: 1 error", 1),
        ([BAD, BAD, SLOW], "training would fail: 2 errors, 1 warning", 1),
    ],
)
def test_the_verdict(findings: list[Finding], sentence: str, code: int) -> None:
    assert (verdict(findings), exit_code(findings)) == (sentence, code)


def test_lines_are_aligned_and_a_check_is_named_once() -> None:
    assert report.lines([GOOD, error("mpi", "c\nits story", "fix that"), SLOW], colour=False) == [
        "mpi      ok       a",
        "         error    c",
        "                    its story",
        "                  fix: fix that",
        "gpu      warning  b",
        "                  fix: fix it",
    ]
    assert report.lines([GOOD], colour=False, before="mpi") == ["         ok       a"]


def test_json_holds_the_same() -> None:
    told = json.loads(json.dumps(report.document([GOOD, BAD], "training would fail: 1 error", 1.23456)))
    assert told == {
        "can_train": False,
        "verdict": "training would fail: 1 error",
        "seconds": 1.235,
        "findings": [
            {"check": "mpi", "level": "ok", "text": "a", "fix": ""},
            {"check": "mpi", "level": "error", "text": "c", "fix": "fix that"},
        ],
    }


@pytest.mark.parametrize(
    ("lines", "status", "answer"),
    [
        ([f'{MARK}{{"a": 1}}'], 0, Answer({"a": 1}, "", (), 0)),
        # A launcher puts the rank in front, and libraries say whatever they like.
        (["hello", f"0: {MARK}[2]", "bye"], 3, Answer([2], "", ("hello", "bye"), 3)),
        ([f"{MARK}{{"], 0, Answer(None, "the process that tried said nothing, exit status 0", (), 0)),
        (["Traceback", "ImportError: no"], 1, Answer(None, "ImportError: no", ("Traceback", "ImportError: no"), 1)),
        (["ImportError: no"], -11, Answer(None, "the process that tried died of SIGSEGV", ("ImportError: no",), -11)),
        ([], None, Answer(None, "the process that tried had not ended after 20 s", (), None)),
    ],
)
def test_what_a_process_answered(lines: list[str], status: int | None, answer: Answer) -> None:
    assert understand(lines, status, 20.0) == answer


def test_a_process_that_hangs_is_ended_with_its_children() -> None:
    start = time.monotonic()
    script = "import subprocess; print('hi', flush=True); subprocess.run(['sleep', '77.25'])"
    status, lines = run([sys.executable, "-c", script], 0.5, {})
    assert (status, lines) == (None, ["hi"])
    assert time.monotonic() - start < 10
    while [each for each in _commands() if each.startswith("sleep 77.25")]:
        assert time.monotonic() - start < 10
        time.sleep(0.02)


def _commands() -> list[str]:
    from pathlib import Path

    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            pass
    return found
