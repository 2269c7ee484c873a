"""What a check has found: a sentence, how bad it is, and the command that mends it."""

from __future__ import annotations

import enum
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Level(enum.Enum):
    """How bad a finding is: as it should be; good to know; training works, though not as it could; it would fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """One line of the report.

    check: which check found it; text: a sentence; mend: a command that mends it, "" where none is known or needed
    """

    check: str
    level: Level
    text: str
    mend: str = ""


def ok(check: str, text: str) -> Finding:
    """All is as it should be."""
    return Finding(check, Level.OK, text)


def note(check: str, text: str, mend: str = "") -> Finding:
    """Good to know, and nothing that must be mended."""
    return Finding(check, Level.NOTE, text, mend)


def warning(check: str, text: str, mend: str = "") -> Finding:
    """Training works, but slower than it could, or not in every case."""
    return Finding(check, Level.WARNING, text, mend)


def error(check: str, text: str, mend: str = "") -> Finding:
    """Training would fail."""
    return Finding(check, Level.ERROR, text, mend)


def count(findings: Sequence[Finding], level: Level) -> int:
    """How many of them are of that level."""
    return sum(each.level is level for each in findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if training would fail, else 0."""
    return 1 if count(findings, Level.ERROR) else 0


def verdict(findings: Sequence[Finding], who: str = "this machine") -> str:
    """What follows from all of them: `this machine can train (1 warning)`, or `training would fail: 2 errors`."""
    errors, warnings = count(findings, Level.ERROR), count(findings, Level.WARNING)
    if errors:
        return f"training would fail: {_number(errors, 'error')}" + (
            f", {_number(warnings, 'warning')}" if warnings else ""
        )
    return f"{who} can train" + (f" ({_number(warnings, 'warning')})" if warnings else "")


def pip(*words: str) -> str:
    """The command that runs pip for this Python: `/venv/bin/python -m pip install mpich`."""
    return shlex.join([sys.executable, "-m", "pip", *words])


def install(*packages: str) -> str:
    """The command that installs these for this Python."""
    return pip("install", *packages)


def _number(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
