"""A bar on a terminal, lines in a log, nothing on other ranks; and a terminal that is left clean."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

import pytest

from collectives import progress_bar as module
from collectives.progress_bar import columns, progress_bar
from collectives.world import AGENT
from tests.launcher.console.terminal_emulator import stderr_on_a_terminal

DONE = r"100%\|█+\| 3/3 \[\d\d:\d\d<00:00, +[\d.]+step/s, loss=0.5\]"


def count_to_3(**options: Any) -> None:
    with progress_bar(range(3), unit="step", **options) as bar:
        for _ in bar:
            bar.set_postfix(loss=0.5, refresh=False)


@pytest.mark.parametrize("width", [100, 60, 20])
def test_a_terminal_shows_one_line_within_its_width(width: int) -> None:
    with stderr_on_a_terminal(width) as terminal:
        count_to_3()
        print("after", file=sys.stderr, flush=True)
        bar, after = terminal.look()  # which fails where a line is too long
    assert re.match(DONE if width > 50 else r"100%\|", bar), bar
    assert after == "after"
    assert "\r  0%|" in terminal.raw


def test_a_bar_that_is_not_left_and_one_that_is_interrupted() -> None:
    with stderr_on_a_terminal(80) as terminal:
        count_to_3(leave=False)
        assert terminal.look() == []
        with pytest.raises(KeyboardInterrupt), progress_bar(range(3)):
            raise KeyboardInterrupt
        print("after", file=sys.stderr, flush=True)
        bar, after = terminal.look()
    assert (bar[:5], after) == ("  0%|", "after")


def test_lines_printed_meanwhile_stand_above() -> None:
    with stderr_on_a_terminal(80) as terminal:
        with progress_bar(total=2) as bar, bar.external_write_mode(sys.stderr):
            print("between", file=sys.stderr)
        between, bar = terminal.look()
    assert (between, bar[:5]) == ("between", "  0%|")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [DONE]),
        ({"leave": False}, []),
        ({"log": False}, []),
        ({"rank": 1}, []),
        ({"delay": 60.0}, []),
        ({"every": 1e-9}, [r" ?33%.* 1/3", r" ?67%.* 2/3", DONE, DONE]),
        ({"every": 1e-9, "delay": 60.0}, []),
    ],
)
def test_a_log_has_plain_lines(
    options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LOG_INTERVAL", options.pop("every", 10.0))
    count_to_3(**options)
    text = capsys.readouterr().err
    lines = text.split("\n")[:-1]
    assert "\r" not in text
    assert len(lines) == len(expected), lines
    assert all(map(re.match, expected, lines)), lines


def test_a_terminal_that_cannot_repaint_has_lines() -> None:
    with stderr_on_a_terminal(100, "dumb") as terminal:
        count_to_3()
        (line,) = terminal.look()
    assert re.fullmatch(DONE, line)
    assert "\r" not in terminal.raw.replace("\r\n", "\n")


def test_whose_terminal_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for name, value in (("COLUMNS", "77"), ("LINES", "24"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    assert columns() == 0, "what a shell has exported says nothing of a file"
    monkeypatch.setenv(AGENT, str(os.getppid()))
    assert columns() == 77, "of ddp-launch"


def test_rank_0_of_the_engine_shows_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("PMI_RANK", rank)
        count_to_3()
        assert capsys.readouterr().err.count("\n") == lines
