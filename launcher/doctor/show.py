"""Findings as text, and as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from launcher.doctor.finding import Finding, Level, exit_code

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
        if finding.mend:
            shown.append(f"{indent}mend: {finding.mend}")
    return shown


def document(findings: Sequence[Finding], sentence: str, seconds: float) -> dict[str, Any]:
    """All of it, as JSON's types."""
    told = [{**each._asdict(), "level": each.level.value} for each in findings]
    return {"can_train": exit_code(findings) == 0, "verdict": sentence, "seconds": round(seconds, 3), "findings": told}


def coloured(stream: IO[str] = sys.stdout, environ: Mapping[str, str] = os.environ) -> bool:
    """True on a terminal, unless NO_COLOR says otherwise."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
