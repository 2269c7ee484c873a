"""What ranks need memory for: their own, what they share, and what their MPI keeps in /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from launcher.doctor.findings import Finding, note, ok, warning
from launcher.doctor.probe import Answer, ask

CHECK = "memory"
_LIMIT = 20.0  # s
_SHM = "/dev/shm"
_MIB, _GIB = 1 << 20, 1 << 30
_SHM_LEAST = 128 * _MIB  # Docker's 64 MiB are too few, and an MPI that finds the file system full dies of SIGBUS
_LEAST = 512 * _MIB  # Python, NumPy and an MPI take about 100 MiB a rank, before any model


class Memory(NamedTuple):
    """Facts, in bytes.

    total, available: of the machine; limit, used: of the control group, None where it has no limit
    shm, shm_free: size of /dev/shm and what is free of it, None where there is none
    container: this is one, as far as can be seen
    """

    total: int
    available: int
    limit: int | None
    used: int
    shm: int | None
    shm_free: int
    container: bool


def look() -> Memory:
    """What there is."""
    words = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    total, available = (int(words.get(name, "0 kB").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = cgroup()
    try:
        shm = os.statvfs(_SHM) if os.path.ismount(_SHM) else None
    except OSError:
        shm = None
    container = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))) or "container" in os.environ
    size, free = (None, 0) if shm is None else (shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize)
    return Memory(total, available, limit, used, size, free, container)


def cgroup(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> tuple[int | None, int]:
    """The least memory limit of this process's control group and those above it, and what is used of that, in bytes."""
    found: list[tuple[int, int]] = []
    for line in _read(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = (
            ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        base = Path(root, controllers)
        for folder in (base / path.lstrip("/"), *(base / path.lstrip("/")).parents):
            if folder.is_relative_to(base):
                limit, used = (_read(str(folder / name)).strip() for name in names)
                if limit.isdigit() and int(limit) < 1 << 60:  # the first version's word for no limit is 2^63
                    found.append((int(limit), int(used or 0)))
    return min(found, key=lambda each: each[0] - each[1], default=(None, 0))


def judge(facts: Memory) -> list[Finding]:
    """What follows from the facts."""
    found = []
    left, where = facts.available, f"of {size(facts.total)}"
    if facts.limit is not None and facts.limit - facts.used < left:
        left, where = max(0, facts.limit - facts.used), f"of the {size(facts.limit)} that the control group allows"
    text = f"{size(left)} of memory free, {where}"
    if left < _LEAST:
        found.append(
            warning(
                CHECK,
                f"{text}: two ranks need about 300 MiB before any model",
                "ps -eo rss,pid,args --sort -rss | head",
            )
        )
    else:
        found.append(ok(CHECK, text))
    fix = "docker run --shm-size=1g ..." if facts.container else f"sudo mount -o remount,size=1g {_SHM}"
    if facts.shm is None:
        missing = "docker run --shm-size=1g ..." if facts.container else f"sudo mount -t tmpfs tmpfs {_SHM}"
        found.append(warning(CHECK, f"{_SHM} is not there, where MPIs keep what ranks share", missing))
    elif facts.shm < _SHM_LEAST:
        text = f"{_SHM} has {size(facts.shm)}: ranks whose MPI fills it are killed by SIGBUS"
        found.append(warning(CHECK, text, fix))
    elif facts.shm_free < _SHM_LEAST:
        there = f"{size(facts.shm_free)} free of {size(facts.shm)}"
        text = f"{_SHM} is full ({there}): ranks whose MPI fills it are killed by SIGBUS"
        found.append(warning(CHECK, text, f"ls -lSh {_SHM} | head"))
    else:
        found.append(ok(CHECK, f"{_SHM} has {size(facts.shm_free)} free of {size(facts.shm)}"))
    return found


def judge_stale_segments(answer: Answer, shm: int | None) -> list[Finding]:
    """What follows from files that killed jobs have left."""
    files, nbytes = (answer.value["files"], answer.value["nbytes"]) if answer.value else (0, 0)
    if not files:
        return []
    number = f"{files} file{'s' * (files != 1)} ({size(nbytes)})"
    text = f"{number} in {_SHM} that MPI jobs left when they were killed, and that nobody uses"
    level = warning if shm is not None and nbytes > shm / 4 else note
    return [level(CHECK, text, "ddp-doctor sweep")]


def judge_sharing(answer: Answer) -> list[Finding]:
    """What follows from a trial of memory that ranks share."""
    slower = "ranks of a machine send through their MPI instead, which is slower"
    if answer.missing:
        return []  # `python` has said so
    if answer.value is None:
        return [warning(CHECK, f"two processes could not share memory ({answer.reason}): {slower}")]
    if answer.value["unsupported"]:
        return [note(CHECK, f"ranks do not share memory, because {answer.value['unsupported']}: {slower}")]
    if trouble := answer.value["trouble"]:
        fix = "sudo mount -o remount,hidepid=0 /proc" if "Permission" in trouble or "No such file" in trouble else ""
        return [warning(CHECK, f"two processes could not share memory ({trouble}): {slower}", fix)]
    return [ok(CHECK, "ranks can share memory (memfd, mapped through /proc)")]


def check() -> list[Finding]:
    """Looks and judges."""
    facts = look()
    sharing = judge_sharing(ask("launcher.doctor.probes", "shared_memory", limit=_LIMIT))
    return [
        *judge(facts),
        *sharing,
        *judge_stale_segments(ask("launcher.doctor.probes", "stale_segments", limit=_LIMIT), facts.shm),
    ]


def size(nbytes: int) -> str:
    """`size(3 << 20) == "3 MiB"`, `size(3 << 29) == "1.5 GiB"`."""
    if nbytes < _GIB:
        return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes >> 10} KiB"
    return f"{nbytes / _GIB:.1f} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
