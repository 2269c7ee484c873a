"""Cores, and the threads that will want them: ranks whose BLAS starts more threads than they have cores get in each
other's way, and ranks whose BLAS is not optimized compute a hundred times as long.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from launcher.doctor.findings import Finding, error, install, note, ok, warning
from launcher.doctor.probe import Answer, ask

CHECK = "threads"
_LIMIT = 30.0  # s; NumPy from a busy network file system
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_BUSY = 0.5  # processes that run, for each core, at which measurements become doubtful


class Threads(NamedTuple):
    """Facts.

    cores: that this process may run on; machine: that there are; quota: cores that its control group lets it use at a
    time, None: all; load: processes that wanted to run in the last minute; chosen: variables that limit threads
    """

    cores: int
    machine: int
    quota: float | None
    load: float
    chosen: dict[str, str]


def look(environ: Mapping[str, str] = os.environ) -> Threads:
    """What there is."""
    chosen = {name: environ[name] for name in _VARIABLES if name in environ}
    cores = len(os.sched_getaffinity(0))
    return Threads(cores, os.cpu_count() or cores, quota(), os.getloadavg()[0], chosen)


def quota(cgroups: str = "/sys/fs/cgroup") -> float | None:
    """Cores that the control group of this process, or one above it, lets it use at a time; None where none says so."""
    limits = []
    mine = _own_group()
    for folder in (Path(cgroups, mine), *Path(cgroups, mine).parents):
        if not folder.is_relative_to(cgroups):
            break
        limits.append(_ratio(_read(folder / "cpu.max").split()))
    for v1 in ("cpu", "cpu,cpuacct"):
        files = (Path(cgroups, v1, name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        limits.append(_ratio([word for file in files for word in _read(file).split()]))
    return min((each for each in limits if each is not None), default=None)


def judge(facts: Threads) -> list[Finding]:
    """What follows from the facts."""
    found = []
    cores = f"{facts.cores} core{'s' * (facts.cores != 1)}"
    whole = cores if facts.cores == facts.machine else f"{cores} of this machine's {facts.machine}"
    limit = facts.cores
    if facts.quota is not None and facts.quota < facts.cores:
        limit = max(1, int(facts.quota))
        text = f"{whole}, but the control group allows {facts.quota:g} at a time: more threads than that only wait"
        found.append(warning(CHECK, text, "export OMP_NUM_THREADS=1"))
    else:
        found.append(ok(CHECK, whole))
    for name, value in facts.chosen.items():
        first = value.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            found.append(warning(CHECK, f"{name}={value} is no number of threads", f"unset {name}"))
        elif int(first) > limit:
            text = f"{name}={value}, with {limit} cores: every rank will start {first} threads, in each other's way"
            found.append(warning(CHECK, text, f"unset {name}"))
        else:
            found.append(ok(CHECK, f"{name}={value} in every rank"))
    if not facts.chosen:
        found.append(ok(CHECK, "OMP_NUM_THREADS is not set: ddp-launch gives each rank its share of the cores"))
    if facts.load > _BUSY * facts.cores + 1:
        text = f"the machine is busy ({facts.load:.1f} processes on {cores}): expect slower times below"
        found.append(note(CHECK, text))
    return found


def judge_blas(answer: Answer) -> list[Finding]:
    """What follows from NumPy's words about itself, or from its silence."""
    if answer.missing:
        return []  # `python` has said so
    if answer.value is None:
        fix = install("--force-reinstall", "numpy", "ml_dtypes")
        return [error(CHECK, f"NumPy does not work here: {answer.reason}", fix)]
    said = answer.value
    name = f"{said['name']} {said['version']}".strip()
    if not said["right"]:
        text = f"NumPy computes wrong numbers with its BLAS ({name or 'unknown'})"
        return [error(CHECK, text, install("--force-reinstall", "numpy", "ml_dtypes"))]
    if said["name"] in ("none", "blas", "netlib", "cblas"):
        text = f"NumPy's BLAS is {name}, which is not optimized: matrix products take up to a hundred times as long"
        return [warning(CHECK, text, install("--force-reinstall", "--only-binary=:all:", "numpy"))]
    threads = (
        "" if said["threads"] is None else f", {said['threads']} thread{'s' * (said['threads'] != 1)} in this process"
    )
    return [ok(CHECK, f"NumPy computes with {name or 'a BLAS that does not say its name'}{threads}; bfloat16 works")]


def check() -> list[Finding]:
    """Looks and judges."""
    return [*judge(look()), *judge_blas(ask("launcher.doctor.probes", "blas", limit=_LIMIT))]


def _own_group() -> str:
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            return line[3:].strip().lstrip("/")
    return ""


def _ratio(words: list[str]) -> float | None:
    try:
        allowed, period = (int(word) for word in words)
    except ValueError:  # "max", or nothing there
        return None
    return allowed / period if allowed > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
