"""Checks of Python, cores and threads, memory, and limits of the system: all that training needs except MPI and GPUs.

Each check gathers facts of the machine and passes them to a pure function, which makes findings of them.
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
from collections.abc import Iterator, Mapping
from pathlib import Path

from collectives import __version__
from launcher.doctor.findings import Finding, error, install, note, ok, warning
from launcher.doctor.probes import Answer, run_probe
from launcher.errors import plural
from launcher.linux import SHM, SHM_PER_RANK, format_bytes, missing_shm, read_text, remove_stale_segments

_MIB = 1 << 20


def control_group(file: str, groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Iterator[str]:
    """The text of `file` in this process's control group (version 2) and in each of its ancestors that has the file."""
    for line in read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # groups of version 1 have controllers
            folder = Path(root, path.lstrip("/"))
            yield from filter(None, (read_text(str(group / file)) for group in (folder, *folder.parents)))


# -- Python

#: The packages that must be installed, and the oldest version of each, as in setup.cfg.
NEEDED = {"numpy": "2.1", "ml_dtypes": "0.4", "mpi4py": "4.0", "threadpoolctl": "3.1", "tqdm": "4.66"}
_OLDEST = (3, 10)


def version(package: str) -> str:
    """The version of a package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Versions that should be equal on all hosts of a job: of Python, ddp-runtime and the packages of `NEEDED`."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python, "ddp-runtime": __version__, **{name: version(name) for name in NEEDED}}


def evaluate_python(
    python: tuple[int, ...], system: str, packages: Mapping[str, str], kernels: Answer
) -> Iterator[Finding]:
    """Evaluates Python and its packages.

    system: such as "Linux x86_64"; packages: the versions of `NEEDED`, "" if not installed
    kernels: the answer of `probes.kernels`
    """
    text = f"Python {'.'.join(map(str, python))}, {sys.executable}"
    if python[:2] < _OLDEST:
        fix = "sudo apt install python3.12-venv && python3.12 -m venv .venv"
        yield error(f"{text}: 3.10 is the oldest that works", fix)
    else:
        yield ok(text)
    if system != "Linux x86_64":
        yield warning(f"this is {system}: only Linux x86_64 is tested")
    for name, oldest in NEEDED.items():
        installed = packages[name]
        if not installed:
            yield error(f"{name} is not installed for this Python", install(f"{name}>={oldest}"))
        elif _numbers(installed) < _numbers(oldest):
            yield error(f"{name} {installed} is too old: {oldest} or newer", install(f"{name}>={oldest}"))
    if all(packages.values()):
        yield ok(", ".join(f"{name} {installed}" for name, installed in packages.items()))
    if kernels.value:
        yield note(f"no fused kernels, ops on the CPU are slower: {kernels.value}")
    elif kernels.value is not None:  # without an answer, most likely a package is missing, as reported above
        yield ok("fused kernels for the CPU")


def python() -> Iterator[Finding]:
    """Checks Python and the packages of `NEEDED`."""
    system = f"{platform.system()} {platform.machine()}"
    packages = {name: version(name) for name in NEEDED}
    return evaluate_python(sys.version_info[:3], system, packages, run_probe("kernels", limit=30.0))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", text)[:2])


# -- cores and threads

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def quota(**places: str) -> float | None:
    """How many cores the control groups let this process use at a time; None: all. places: as for `control_group`"""
    quotas = (text.split() for text in control_group("cpu.max", **places))
    return min((int(time) / int(period) for time, period in quotas if time != "max"), default=None)


def evaluate_threads(cores: int, machine: int, quota: float | None, chosen: Mapping[str, str]) -> Iterator[Finding]:
    """Evaluates the number of threads of a rank.

    cores: how many this process may use; machine: how many the machine has; chosen: those of `_VARIABLES` that are set
    """
    text = plural(cores, "core") + (f" of this machine's {machine}" if cores != machine else "")
    usable = cores
    if quota is not None and quota < cores:
        usable = max(1, int(quota))
        warning_text = f"{text}, but the control group allows {quota:g} at a time: more threads than that only wait"
        yield warning(warning_text, "export OMP_NUM_THREADS=1")
    else:
        yield ok(text)
    for name, value in chosen.items():
        first = value.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            yield warning(f"{name}={value} is not a number of threads", f"unset {name}")
        elif int(first) > usable:
            text = f"{name}={value}, with {usable} cores: every rank starts {first} threads, which slow each other down"
            yield warning(text, f"unset {name}")
        else:
            yield ok(f"{name}={value} in every rank")
    if not chosen:
        yield ok("OMP_NUM_THREADS is not set: ddp-launch gives each rank its share of the cores")


def evaluate_blas(answer: Answer) -> Iterator[Finding]:
    """Evaluates NumPy's BLAS. answer: of `probes.blas`"""
    fix = install("--force-reinstall", "numpy", "ml_dtypes")
    if answer.missing:
        return  # the check of Python reports the missing package
    if answer.value is None:
        yield error(f"NumPy does not work here: {answer.reason}", fix)
        return
    blas = answer.value
    name = f"{blas['name']} {blas['version']}".strip() or "an unknown BLAS"
    if not blas["right"]:
        yield error(f"NumPy computes wrong numbers with {name}", fix)
    elif blas["name"] in ("none", "blas", "netlib", "cblas"):
        text = f"NumPy's BLAS is {name}, which is not optimized: matrix products take up to a hundred times as long"
        yield warning(text, install("--force-reinstall", "--only-binary=:all:", "numpy"))
    else:
        yield ok(f"NumPy computes with {name}, {plural(blas['threads'], 'thread')} in this process; bfloat16 works")


def threads() -> Iterator[Finding]:
    """Checks the cores, how many threads a rank will start on them, and NumPy's BLAS."""
    cores = len(os.sched_getaffinity(0))
    chosen = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    yield from evaluate_threads(cores, os.cpu_count() or cores, quota(), chosen)
    yield from evaluate_blas(run_probe("blas", limit=30.0))


# -- memory

# /dev/shm should have room for this many ranks, or for one rank per core if there are more cores. Docker's default of
# 64 MiB is too small for 24 ranks.
_SHM_RANKS = 24
# Less free memory (bytes) causes a warning. Python, NumPy and an MPI take 50 to 100 MiB per rank, before any model.
_MIN_MEMORY = 512 * _MIB


def memory_limit(**places: str) -> int | None:
    """How many more bytes the control groups let this process use; None: no limit. places: as for `control_group`"""
    limits = control_group("memory.max", **places)
    used = control_group("memory.current", **places)
    free = [int(limit) - int(now) for limit, now in zip(limits, used, strict=False) if limit.strip() != "max"]
    return max(0, min(free)) if free else None


def evaluate_memory(
    total: int,
    available: int,
    limit: int | None,
    shm_free: int,
    missing: tuple[str, str] | None,
    stale: tuple[int, int],
) -> Iterator[Finding]:
    """Evaluates memory, in bytes.

    total, available: of the machine; limit: what the control group leaves; shm_free: free in /dev/shm

    missing: why MPICH cannot have as much of /dev/shm as it needs, and a fix; None if it can
    stale: the number of files of killed MPI jobs in /dev/shm, and their bytes
    """
    free_memory = available
    source = f"of {format_bytes(total)}"
    if limit is not None and limit < available:
        free_memory = limit
        source = "that the control group leaves"
    text = f"{format_bytes(free_memory)} of memory free, {source}"
    if free_memory < _MIN_MEMORY:
        yield warning(
            f"{text}: two ranks need about 300 MiB before any model", "ps -eo rss,pid,args --sort -rss | head"
        )
    else:
        yield ok(text)
    if missing is not None:
        yield warning(*missing)
    else:
        ranks = plural(shm_free // SHM_PER_RANK, "rank")
        yield ok(f"{SHM} has {format_bytes(shm_free)} free, enough for MPICH with {ranks}")
    files, nbytes = stale
    if files:
        text = f"{plural(files, 'file')} ({format_bytes(nbytes)}) of killed MPI jobs in {SHM}, which no process uses"
        yield note(text, "ddp-doctor sweep")


def evaluate_sharing(answer: Answer) -> Iterator[Finding]:
    """Evaluates whether ranks can share memory. answer: of `probes.shared_memory`"""
    slower = "ranks of a machine send through their MPI instead, which is slower"
    if answer.missing:
        return  # the check of Python reports the missing package
    if answer.value is not None and answer.value["unsupported"]:
        yield note(f"ranks do not share memory, because {answer.value['unsupported']}: {slower}")
    elif failure := answer.reason if answer.value is None else answer.value["failure"]:
        fix = "sudo mount -o remount,hidepid=0 /proc" if "Permission" in failure or "No such file" in failure else ""
        yield warning(f"two processes could not share memory ({failure}): {slower}", fix)
    else:
        yield ok("ranks can share memory (memfd, mapped through /proc)")


def memory() -> Iterator[Finding]:
    """Checks memory for ranks: their own, what they share, and what their MPI keeps in /dev/shm."""
    fields = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines())
    total, available = (int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    free = shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0
    missing = missing_shm(max(_SHM_RANKS, len(os.sched_getaffinity(0))))
    stale = remove_stale_segments(0.0, SHM, dry_run=True)
    yield from evaluate_memory(total, available, memory_limit(), free, missing, stale)
    yield from evaluate_sharing(run_probe("shared_memory", limit=20.0))


def sweep(folder: str = SHM) -> int:
    """`ddp-doctor sweep`: removes files of killed MPI jobs; returns 1 if some are left, else 0."""
    files, nbytes = remove_stale_segments(0.0, folder)
    remaining, _ = remove_stale_segments(0.0, folder, dry_run=True)
    removed = f"{plural(files, 'file')} of killed MPI jobs removed from {folder} ({format_bytes(nbytes)})"
    print(f"{removed}, {remaining} are left")
    return 1 if remaining else 0


# -- limits of the system

# Minimum limit on open files (ulimit -n), and minimum disk space for temporary files (bytes): else there is a warning.
_MIN_FILES = 256
_MIN_DISK = 100 * _MIB


def evaluate_limits(files: int, folder: str, free: int | None) -> Iterator[Finding]:
    """Evaluates limits of the system. files: how many this process may have open, -1: unlimited

    free: bytes left for temporary files in `folder`; None: no file can be made there
    """
    if 0 <= files < _MIN_FILES:
        text = f"a process may have only {files} files open: each rank takes some of ddp-launch's"
        yield warning(text, "ulimit -n 4096  # or: sudo prlimit --pid $$ --nofile=4096:4096")
    else:
        yield ok(f"a process may have {'any number of' if files < 0 else files} files open")
    elsewhere = "export TMPDIR=$HOME/tmp; mkdir -p $TMPDIR"
    if free is None:
        yield error(f"no temporary file can be made in {folder}, and the launcher needs some", elsewhere)
    elif free < _MIN_DISK:
        yield warning(f"{folder} has {format_bytes(free)} free, which temporary files may fill", elsewhere)
    else:
        yield ok(f"{folder} has {format_bytes(free)} free for temporary files")


def limits() -> Iterator[Finding]:
    """Checks how many files a process may open, and the disk for temporary files."""
    folder = os.environ.get("TMPDIR") or "/tmp"
    free = None
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError:
        pass  # the folder is missing, full or not writable: `evaluate_limits` reports it
    return evaluate_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], folder, free)
