"""What a machine must have before MPI and GPUs matter: Python, cores and threads, memory, and what the system rations.

Each check gathers facts, which depend on the machine, and passes them to a function that judges them, which does not.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.doctor.findings import Finding, error, install, note, ok, warning
from launcher.doctor.probes import Answer, ask
from launcher.linux import read_text, remove_stale_segments

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def size(nbytes: int) -> str:
    """`size(3 << 20) == "3 MiB"`, `size(3 << 29) == "1.5 GiB"`."""
    if nbytes < _GIB:
        return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes // _KIB} KiB"
    return f"{nbytes / _GIB:.1f} GiB"


def plural(n: int, what: str) -> str:
    """`plural(2, "core") == "2 cores"`."""
    return f"{n} {what}{'s' * (n != 1)}"


def cgroup(
    controller: str,
    v2: Sequence[str],
    v1: Sequence[str],
    groups: str = "/proc/self/cgroup",
    root: str = "/sys/fs/cgroup",
) -> Iterator[list[str]]:
    """The words in files of this process's control group and of each above it. v2, v1: their names in either version"""
    for line in read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        names = v2 if not controllers else v1 if controller in controllers.split(",") else ()
        base = Path(root, controllers)
        for folder in (base / path.lstrip("/"), *(base / path.lstrip("/")).parents):
            if names and folder.is_relative_to(base):
                yield [word for name in names for word in read_text(str(folder / name)).split()]


def in_container() -> bool:
    """True in a container, as far as can be seen."""
    return any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))) or "container" in os.environ


# -- Python

#: What must be installed, and from which version on, as setup.cfg has it.
NEEDED = {"numpy": "2.0", "ml_dtypes": "0.4", "mpi4py": "4.0"}
_OLDEST, _NEWEST = (3, 10), (3, 14)


def version(package: str) -> str:
    """The version of an installed package, "" if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_python(
    python: tuple[int, int, int], executable: str, system: str, machine: str, packages: Mapping[str, str]
) -> list[Finding]:
    """packages: version of each that is needed, "" where it is not installed"""
    found = []
    text = f"Python {'.'.join(map(str, python))}, {executable}"
    if python[:2] < _OLDEST:
        fix = "sudo apt install python3.12-venv && python3.12 -m venv .venv"
        found.append(error("python", f"{text}: 3.10 is the oldest that works", fix))
    elif python[:2] > _NEWEST:
        found.append(note("python", f"{text}: newer than the versions that are tested (3.10 to 3.14)"))
    else:
        found.append(ok("python", text))
    if system != "Linux":
        found.append(error("python", f"this is {system}: only Linux is supported"))
    elif machine != "x86_64":
        found.append(warning("python", f"this is {machine}: only x86_64 is tested"))
    for name, least in NEEDED.items():
        have = packages[name]
        if not have:
            found.append(error("python", f"{name} is not installed for this Python", install(f"{name}>={least}")))
        elif _numbers(have) < _numbers(least):
            found.append(error("python", f"{name} {have} is too old: {least} or newer", install(f"{name}>={least}")))
    if all(packages.values()):
        found.append(ok("python", ", ".join(f"{name} {have}" for name, have in packages.items())))
    return found


def judge_kernels(answer: Answer) -> list[Finding]:
    """answer: why there are no fused kernels for the CPU, "" if there are."""
    if answer.value is None:
        return []  # what is missing has its own finding
    if answer.value:
        return [note("python", f"no fused kernels, ops on the CPU are slower: {answer.value}")]
    return [ok("python", "fused kernels for the CPU")]


def python() -> list[Finding]:
    """Python, and the packages without which nothing works."""
    packages = {name: version(name) for name in NEEDED}
    return [
        *judge_python(sys.version_info[:3], sys.executable, platform.system(), platform.machine(), packages),
        *judge_kernels(ask("launcher.doctor.probes", "kernels", limit=30.0)),
    ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text)[:2])


# -- cores and threads

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_BUSY = 0.5  # processes that run, for each core, at which measurements become doubtful


def quota(**places: str) -> float | None:
    """Cores that control groups let this process use at a time; None: all. places: for `cgroup`"""
    limits = []
    for words in cgroup("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"], **places):
        if len(words) == 2 and all(word.isdigit() for word in words):  # else there is no limit
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def judge_threads(
    cores: int, machine: int, quota: float | None, load: float, chosen: Mapping[str, str]
) -> list[Finding]:
    """cores: of this process, of the machine's; load: processes that wanted to run; chosen: variables for threads"""
    found = []
    whole = plural(cores, "core") + (f" of this machine's {machine}" if cores != machine else "")
    limit = cores
    if quota is not None and quota < cores:
        limit = max(1, int(quota))
        text = f"{whole}, but the control group allows {quota:g} at a time: more threads than that only wait"
        found.append(warning("threads", text, "export OMP_NUM_THREADS=1"))
    else:
        found.append(ok("threads", whole))
    for name, value in chosen.items():
        first = value.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            found.append(warning("threads", f"{name}={value} is no number of threads", f"unset {name}"))
        elif int(first) > limit:
            text = f"{name}={value}, with {limit} cores: every rank will start {first} threads, in each other's way"
            found.append(warning("threads", text, f"unset {name}"))
        else:
            found.append(ok("threads", f"{name}={value} in every rank"))
    if not chosen:
        found.append(ok("threads", "OMP_NUM_THREADS is not set: ddp-launch gives each rank its share of the cores"))
    if load > _BUSY * cores + 1:
        text = f"the machine is busy ({load:.1f} processes on {plural(cores, 'core')}): expect slower times below"
        found.append(note("threads", text))
    return found


def judge_blas(answer: Answer) -> list[Finding]:
    """answer: of `probes.blas`"""
    fix = install("--force-reinstall", "numpy", "ml_dtypes")
    if answer.missing:
        return []  # `python` names it
    if answer.value is None:
        return [error("threads", f"NumPy does not work here: {answer.reason}", fix)]
    blas = answer.value
    name = f"{blas['name']} {blas['version']}".strip()
    if not blas["right"]:
        return [error("threads", f"NumPy computes wrong numbers with its BLAS ({name or 'unknown'})", fix)]
    if blas["name"] in ("none", "blas", "netlib", "cblas"):
        text = f"NumPy's BLAS is {name}, which is not optimized: matrix products take up to a hundred times as long"
        return [warning("threads", text, install("--force-reinstall", "--only-binary=:all:", "numpy"))]
    count = "" if blas["threads"] is None else f", {plural(blas['threads'], 'thread')} in this process"
    return [ok("threads", f"NumPy computes with {name or 'an unknown BLAS'}{count}; bfloat16 works")]


def threads() -> list[Finding]:
    """Cores, the threads that will want them, and NumPy's BLAS."""
    cores = len(os.sched_getaffinity(0))
    chosen = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    found = judge_threads(cores, os.cpu_count() or cores, quota(), os.getloadavg()[0], chosen)
    return [*found, *judge_blas(ask("launcher.doctor.probes", "blas", limit=30.0))]


# -- memory

#: Where MPIs keep what ranks of a machine share.
SHM = "/dev/shm"
_SHM_LEAST = 128 * _MIB  # Docker's 64 MiB are too few, and an MPI that finds the file system full dies of SIGBUS
_LEAST = 512 * _MIB  # Python, NumPy and an MPI take about 100 MiB a rank, before any model


def memory_limit(**places: str) -> tuple[int | None, int]:
    """The tightest memory limit of control groups, and what is used of it, in bytes. places: for `cgroup`"""
    found: list[tuple[int, int]] = []
    v1 = ["memory.limit_in_bytes", "memory.usage_in_bytes"]
    for words in cgroup("memory", ["memory.max", "memory.current"], v1, **places):
        if words and words[0].isdigit() and int(words[0]) < 1 << 60:  # the first version's word for no limit is 2^63
            found.append((int(words[0]), int(words[1]) if words[1:] else 0))
    return min(found, key=lambda each: each[0] - each[1], default=(None, 0))


def judge_memory(
    total: int, available: int, limit: int | None, used: int, shm: int | None, shm_free: int, container: bool
) -> list[Finding]:
    """Bytes: of the machine, of the control group, and of /dev/shm, None where there is none."""
    left, where = available, f"of {size(total)}"
    if limit is not None and limit - used < left:
        left, where = max(0, limit - used), f"of the {size(limit)} that the control group allows"
    text = f"{size(left)} of memory free, {where}"
    if left < _LEAST:
        fix = "ps -eo rss,pid,args --sort -rss | head"
        found = [warning("memory", f"{text}: two ranks need about 300 MiB before any model", fix)]
    else:
        found = [ok("memory", text)]
    killed = "ranks whose MPI fills it are killed by SIGBUS"
    larger = "docker run --shm-size=1g ..." if container else f"sudo mount -o remount,size=1g {SHM}"
    if shm is None:
        fix = larger if container else f"sudo mount -t tmpfs tmpfs {SHM}"
        found.append(warning("memory", f"{SHM} is not there, where MPIs keep what ranks share", fix))
    elif shm < _SHM_LEAST:
        found.append(warning("memory", f"{SHM} has {size(shm)}: {killed}", larger))
    elif shm_free < _SHM_LEAST:
        text = f"{SHM} is full ({size(shm_free)} free of {size(shm)}): {killed}"
        found.append(warning("memory", text, f"ls -lSh {SHM} | head"))
    else:
        found.append(ok("memory", f"{SHM} has {size(shm_free)} free of {size(shm)}"))
    return found


def judge_sharing(answer: Answer) -> list[Finding]:
    """answer: of `probes.shared_memory`"""
    slower = "ranks of a machine send through their MPI instead, which is slower"
    if answer.missing:
        return []  # `python` names it
    if answer.value is not None and answer.value["unsupported"]:
        return [note("memory", f"ranks do not share memory, because {answer.value['unsupported']}: {slower}")]
    if trouble := answer.reason if answer.value is None else answer.value["trouble"]:
        fix = "sudo mount -o remount,hidepid=0 /proc" if "Permission" in trouble or "No such file" in trouble else ""
        return [warning("memory", f"two processes could not share memory ({trouble}): {slower}", fix)]
    return [ok("memory", "ranks can share memory (memfd, mapped through /proc)")]


def judge_stale_segments(files: int, nbytes: int, shm: int | None) -> list[Finding]:
    """files, nbytes: of killed MPI jobs"""
    if not files:
        return []
    text = f"{plural(files, 'file')} ({size(nbytes)}) in {SHM} that killed MPI jobs left, and that no process uses"
    level = warning if shm is not None and nbytes > shm / 4 else note
    return [level("memory", text, "ddp-doctor sweep")]


def memory() -> list[Finding]:
    """Memory of ranks: their own, what they share, and what their MPI keeps in /dev/shm."""
    words = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines())
    total, available = (int(words.get(name, "0 kB").split()[0]) * _KIB for name in ("MemTotal", "MemAvailable"))
    shm, free = None, 0
    if os.path.ismount(SHM):
        shm, _, free = shutil.disk_usage(SHM)
    return [
        *judge_memory(total, available, *memory_limit(), shm, free, in_container()),
        *judge_sharing(ask("launcher.doctor.probes", "shared_memory", limit=20.0)),
        *judge_stale_segments(*remove_stale_segments(0.0, SHM, dry_run=True), shm),
    ]


def sweep(folder: str = SHM) -> int:
    """`ddp-doctor sweep`: removes files of killed MPI jobs; returns 1 if some are still there, else 0."""
    files, nbytes = remove_stale_segments(0.0, folder)
    print(f"{files} files of killed MPI jobs removed from {folder} ({nbytes / _MIB:.0f} MiB)")
    left, _ = remove_stale_segments(0.0, folder, dry_run=True)
    if left:
        print(f"{left} could not be removed")
    return 1 if left else 0


# -- what the system rations

_FILES_LEAST, _FILES_WANTED = 256, 4096
_PROCESSES_LEAST = 256
_ROOM_LEAST = 100 * _MIB


def judge_limits(
    files: int | None,
    files_hard: int | None,
    processes: int | None,
    locked: int | None,
    infiniband: bool,
    folder: str,
    room: int | None,
) -> list[Finding]:
    """Limits of this process, None: unlimited; room: bytes for temporary files in `folder`, None: it is not writable"""
    found = []
    if files is not None and files < _FILES_LEAST:
        reach = _FILES_WANTED if files_hard is None else min(files_hard, _FILES_WANTED)
        fix = f"ulimit -n {reach}" if reach > files else "sudo prlimit --pid $$ --nofile=4096:4096"
        text = f"a process may have only {files} files open: each rank takes some of ddp-launch's"
        found.append(warning("limits", text, fix))
    else:
        found.append(ok("limits", f"a process may have {'any number of' if files is None else files} files open"))
    if processes is not None and processes < _PROCESSES_LEAST:
        text = f"this user may have only {processes} processes and threads"
        found.append(warning("limits", text, "ulimit -u $(ulimit -Hu)"))
    if infiniband and locked is not None:
        text = f"only {size(locked)} of memory may be locked, which InfiniBand needs for what it sends"
        found.append(warning("limits", text, "ulimit -l unlimited"))
    elsewhere = "export TMPDIR=$HOME/tmp; mkdir -p $TMPDIR"
    if room is None:
        text = f"no temporary file can be made in {folder}, and the launcher needs some"
        found.append(error("limits", text, "unset TMPDIR" if folder != "/tmp" else elsewhere))
    elif room < _ROOM_LEAST:
        text = f"{folder} has {size(room)} free, which temporary files may fill"
        found.append(warning("limits", text, elsewhere))
    else:
        found.append(ok("limits", f"{folder} has {size(room)} free for temporary files"))
    return found


def limits() -> list[Finding]:
    """Open files, processes, locked memory, room for temporary files."""
    (files, files_hard), (processes, _), (locked, _) = (
        [None if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(which)]
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    )
    cards = "/sys/class/infiniband"
    infiniband = os.path.isdir(cards) and bool(os.listdir(cards))
    folder, room = os.environ.get("TMPDIR") or "/tmp", None
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = shutil.disk_usage(folder).free
    except OSError:
        pass  # not there, full, or not writable: that is the finding
    return judge_limits(files, files_hard, processes, locked, infiniband, folder, room)
