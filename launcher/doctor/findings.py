"""A finding of a check: a sentence, how bad it is, and the command that fixes it; as text and as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from launcher.errors import plural

# The levels, and the colour of each on a terminal.
_COLOURS = {"ok": "32", "note": "36", "warning": "33", "error": "31;1"}
# The width of the columns of checks and of levels, in characters.
_WIDTH = 8


class Finding(NamedTuple):
    """One line of the report.

    level: "ok"; "note": good to know; "warning": training works, slower or not in every case; "error": it would fail
    text: a sentence; fix: a command that fixes it, "" where none is known or needed
    check: the name of the check that found it; "": the one that is running
    """

    level: str
    text: str
    fix: str = ""
    check: str = ""


ok, note, warning, error = (partial(Finding, level) for level in _COLOURS)


def count(findings: Sequence[Finding], level: str) -> int:
    """How many findings are of that level."""
    return sum(finding.level == level for finding in findings)


def verdict(findings: Sequence[Finding], who: str = "this machine") -> str:
    """The conclusion: `this machine can train (1 warning)`, or `training would fail: 2 errors, 0 warnings`."""
    errors, warnings = (plural(count(findings, level), level) for level in ("error", "warning"))
    if count(findings, "error"):
        return f"training would fail: {errors}, {warnings}"
    return f"{who} can train" + (f" ({warnings})" if count(findings, "warning") else "")


def lines(findings: Sequence[Finding], colour: bool) -> list[str]:
    """The lines of findings. Only the first finding of a check shows the check's name."""
    report = []
    previous_check = ""
    for finding in findings:
        name = finding.check if finding.check != previous_check else ""
        previous_check = finding.check
        level = finding.level.ljust(_WIDTH)
        if colour:
            level = f"\x1b[{_COLOURS[finding.level]}m{level}\x1b[0m"
        indent = " " * (2 * _WIDTH + 2)
        first, *continuation = finding.text.split("\n")
        report.append(f"{name:{_WIDTH}} {level} {first}")
        report += [f"{indent}  {line}" for line in continuation]
        if finding.fix:
            report.append(f"{indent}fix: {finding.fix}")
    return report


def document(findings: Sequence[Finding], sentence: str, seconds: float) -> dict[str, Any]:
    """The report as a JSON object. sentence: the verdict; seconds: how long the checks took"""
    return {
        "can_train": not count(findings, "error"),
        "verdict": sentence,
        "seconds": round(seconds, 3),
        "findings": [finding._asdict() for finding in findings],
    }


def pip(*words: str) -> str:
    """The command that runs pip for this Python: `/venv/bin/python -m pip install mpich`."""
    return shlex.join([sys.executable, "-m", "pip", *words])


def install(*packages: str) -> str:
    """The command that installs these packages for this Python."""
    return pip("install", *packages)
