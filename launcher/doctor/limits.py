"""What the system rations: open files, processes, locked memory, room for temporary files; and its clock."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from typing import NamedTuple

from launcher.doctor.findings import Finding, error, ok, warning
from launcher.doctor.memory import size

CHECK = "limits"
_FILES_LEAST = 256
_FILES_WANTED = 4096
_PROCESSES_LEAST = 256
_ROOM_LEAST = 100 << 20  # bytes
_CLOCK_COST = 1e-6  # s
_YEAR = 2025


class Limits(NamedTuple):
    """Facts.

    files, files_hard, processes, locked: limits of this process, None: unlimited; locked in bytes
    infiniband: there is such a network card, which needs locked memory
    folder, room, writable: of temporary files; room in bytes
    clock: what one reading costs, in s; source: the kernel's name for it; year: by the clock
    """

    files: int | None
    files_hard: int | None
    processes: int | None
    locked: int | None
    infiniband: bool
    folder: str
    room: int
    writable: bool
    clock: float
    source: str
    year: int


def look() -> Limits:
    """What there is."""
    files, files_hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    locked = _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    cards = "/sys/class/infiniband"
    infiniband = os.path.isdir(cards) and bool(os.listdir(cards))
    folder, room, writable = os.environ.get("TMPDIR") or "/tmp", 0, False
    try:
        room = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            writable = True
    except OSError:
        pass  # no room, or not writable: that is the finding
    return Limits(
        *(files, files_hard, processes, locked, infiniband, folder, room, writable),
        *(_clock_cost(), _clock_source(), time.gmtime().tm_year),
    )


def judge(facts: Limits) -> list[Finding]:
    """What follows."""
    found = []
    if facts.files is not None and facts.files < _FILES_LEAST:
        hard = facts.files_hard
        reach = _FILES_WANTED if hard is None else min(hard, _FILES_WANTED)
        fix = f"ulimit -n {reach}" if reach > facts.files else "sudo prlimit --pid $$ --nofile=4096:4096"
        text = f"a process may have only {facts.files} files open: each rank takes some of ddp-launch's"
        found.append(warning(CHECK, text, fix))
    else:
        found.append(ok(CHECK, f"a process may have {_or_any(facts.files)} files open"))
    if facts.processes is not None and facts.processes < _PROCESSES_LEAST:
        text = f"this user may have only {facts.processes} processes and threads"
        found.append(warning(CHECK, text, "ulimit -u $(ulimit -Hu)"))
    if facts.infiniband and facts.locked is not None:
        text = f"only {size(facts.locked)} of memory may be locked, which InfiniBand needs for what it sends"
        found.append(warning(CHECK, text, "ulimit -l unlimited"))
    if not facts.writable:
        text = f"no temporary file can be made in {facts.folder}, and the launcher needs some"
        fix = "unset TMPDIR" if facts.folder != "/tmp" else "export TMPDIR=$HOME/tmp; mkdir -p $TMPDIR"
        found.append(error(CHECK, text, fix))
    elif facts.room < _ROOM_LEAST:
        text = f"{facts.folder} has {size(facts.room)} free, which temporary files may fill"
        found.append(warning(CHECK, text, "export TMPDIR=$HOME/tmp; mkdir -p $TMPDIR"))
    else:
        found.append(ok(CHECK, f"{facts.folder} has {size(facts.room)} free for temporary files"))
    if facts.clock > _CLOCK_COST:
        cost, source = f"{facts.clock * 1e6:.1f} us", facts.source or "unknown"
        text = f"reading the clock takes {cost} (its source is {source}): every call gets slower"
        fix = "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource"
        found.append(warning(CHECK, text, "" if facts.source == "tsc" else fix))
    if facts.year < _YEAR:
        found.append(
            warning(
                CHECK,
                f"the clock says that it is {facts.year}: dates in logs will be wrong",
                "sudo timedatectl set-ntp true",
            )
        )
    return found


def check() -> list[Finding]:
    """Looks and judges."""
    return judge(look())


def _limit(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def _or_any(number: int | None) -> str:
    return "any number of" if number is None else str(number)


def _clock_cost() -> float:
    best = float("inf")
    for _ in range(5):  # the least: another process may have had the core
        start = time.perf_counter()
        for _ in range(200):
            time.monotonic_ns()
        best = min(best, (time.perf_counter() - start) / 200)
    return best


def _clock_source() -> str:
    try:
        with open("/sys/devices/system/clocksource/clocksource0/current_clocksource") as file:
            return file.read().strip()
    except OSError:
        return ""
