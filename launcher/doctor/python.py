"""Python, and the packages without which nothing works."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from typing import NamedTuple

from launcher.doctor.findings import Finding, error, install, note, ok, warning

CHECK = "python"
_OLDEST, _NEWEST = (3, 10), (3, 14)
#: What must be installed, and from which version on, as setup.cfg has it.
NEEDED = {"numpy": "2.0", "ml_dtypes": "0.4", "mpi4py": "4.0"}
_TESTED = "x86_64"


class Python(NamedTuple):
    """Facts. packages: version of each that is needed, "" where it is not installed."""

    version: tuple[int, int, int]
    executable: str
    system: str
    machine: str
    packages: dict[str, str]


def version(package: str) -> str:
    """The version of an installed package, "" if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def look() -> Python:
    """What there is."""
    packages = {name: version(name) for name in NEEDED}
    return Python(sys.version_info[:3], sys.executable, platform.system(), platform.machine(), packages)


def judge(facts: Python) -> list[Finding]:
    """What follows."""
    found = []
    text = f"Python {'.'.join(map(str, facts.version))}, {facts.executable}"
    if facts.version[:2] < _OLDEST:
        fix = "sudo apt install python3.12-venv && python3.12 -m venv .venv"
        found.append(error(CHECK, f"{text}: 3.10 is the oldest that works", fix))
    elif facts.version[:2] > _NEWEST:
        found.append(note(CHECK, f"{text}: newer than the versions that are tested (3.10 to 3.14)"))
    else:
        found.append(ok(CHECK, text))
    if facts.system != "Linux":
        found.append(error(CHECK, f"this is {facts.system}: only Linux is supported"))
    elif facts.machine != _TESTED:
        found.append(warning(CHECK, f"this is {facts.machine}: only {_TESTED} is tested"))
    for name, least in NEEDED.items():
        have = facts.packages[name]
        if not have:
            found.append(error(CHECK, f"{name} is not installed for this Python", install(f"{name}>={least}")))
        elif _numbers(have) < _numbers(least):
            found.append(error(CHECK, f"{name} {have} is too old: {least} or newer", install(f"{name}>={least}")))
    there = [f"{name} {have}" for name, have in facts.packages.items() if have]
    if len(there) == len(NEEDED):
        found.append(ok(CHECK, ", ".join(there)))
    return found


def check() -> list[Finding]:
    """Looks and judges."""
    return judge(look())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text)[:2])
