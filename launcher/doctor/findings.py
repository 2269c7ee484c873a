"""What a check has found: a sentence, how bad it is, and the command that fixes it; as text and as JSON."""

from __future__ import annotations

import enum
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple


class Level(enum.Enum):
    """How bad a finding is: as it should be; good to know; training works, though not as it could; it would fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """One line of the report.

    check: which check found it; text: a sentence; fix: a command that fixes it, "" where none is known or needed
    """

    check: str
    level: Level
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    """All is as it should be."""
    return Finding(check, Level.OK, text)


def note(check: str, text: str, fix: str = "") -> Finding:
    """Good to know, and nothing that must be fixed."""
    return Finding(check, Level.NOTE, text, fix)


def warning(check: str, text: str, fix: str = "") -> Finding:
    """Training works, but slower than it could, or not in every case."""
    return Finding(check, Level.WARNING, text, fix)


def error(check: str, text: str, fix: str = "") -> Finding:
    """Training would fail."""
    return Finding(check, Level.ERROR, text, fix)


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


_WIDTH = 8  # of the names of checks and of levels
_COLOURS = {Level.OK: "32", Level.NOTE: "36", Level.WARNING: "33", Level.ERROR: "31;1"}


def lines(findings: Sequence[Finding], colour: bool, before: str = "") -> list[str]:
    """The lines of some findings; a check's name stands only at its first. before: the check of the line above"""
    shown = []
    for finding in findings:
        name = finding.check if finding.check != before else ""
        before = finding.check
        level = finding.level.value.ljust(_WIDTH)
        if colour:
            level = f"\x1b[{_COLOURS[finding.level]}m{level}\x1b[0m"
        indent = " " * (2 * _WIDTH + 2)
        first, *more = finding.text.split("\n")
        shown.append(f"{name:{_WIDTH}} {level} {first}")
        shown += [f"{indent}  {line}" for line in more]
        if finding.fix:
            shown.append(f"{indent}fix: {finding.fix}")
    return shown


def document(findings: Sequence[Finding], sentence: str, seconds: float) -> dict[str, Any]:
    """All of it, as JSON's types."""
    plain = [{**each._asdict(), "level": each.level.value} for each in findings]
    return {"can_train": exit_code(findings) == 0, "verdict": sentence, "seconds": round(seconds, 3), "findings": plain}


def coloured(stream: IO[str] = sys.stdout, environ: Mapping[str, str] = os.environ) -> bool:
    """True on a terminal, unless NO_COLOR says otherwise."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
