"""Facts about a machine, made up, and what the doctor makes of them: no test here depends on the machine it runs on."""

from __future__ import annotations

import mmap
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import machine
from launcher.doctor.findings import install
from launcher.doctor.probes import Answer
from launcher.linux import remove_stale_segments

MIB, GIB = 1 << 20, 1 << 30
PACKAGES = {"numpy": "2.4.6", "ml_dtypes": "0.6.0", "mpi4py": "4.1.2"}
PYTHON_FACTS = {"python": (3, 11, 7), "executable": "/venv/bin/python", "system": "Linux", "machine": "x86_64"}
MEMORY_FACTS = {"total": 16 * GIB, "available": 8 * GIB, "limit": None, "used": 0, "shm": 8 * GIB, "shm_free": 8 * GIB}
LIMITS_FACTS = {"files": 1024, "files_hard": 4096, "processes": None, "locked": 8 * MIB, "infiniband": False}
GOOD: dict[str, dict[str, Any]] = {
    "kernels": {},
    "python": {**PYTHON_FACTS, "packages": PACKAGES},
    "threads": {"cores": 8, "machine": 8, "quota": None, "load": 0.5, "chosen": {}},
    "memory": {**MEMORY_FACTS, "container": False},
    "limits": {**LIMITS_FACTS, "folder": "/tmp", "room": GIB},
}
HAS = "ok numpy 2.4.6, ml_dtypes 0.6.0, mpi4py 4.1.2"
PYTHON = "ok Python 3.11.7, /venv/bin/python"
CORES, UNSET = "ok 8 cores", "ok OMP_NUM_THREADS is not set"
ROOM, SHM = "ok 8.0 GiB of memory free, of 16.0 GiB", "ok /dev/shm has 8.0 GiB free of 8.0 GiB"
FILES, TMP = "ok 1024 files open", "ok /tmp has 1.0 GiB free"


@pytest.mark.parametrize(
    ("check", "change", "expected"),
    [
        ("python", {}, [PYTHON, HAS]),
        ("python", {"python": (3, 9, 1)}, ["error 3.10 is the oldest -> venv", HAS]),
        ("python", {"python": (3, 15, 0)}, ["note newer than", HAS]),
        ("python", {"system": "Darwin"}, [PYTHON, "error this is Darwin", HAS]),
        ("python", {"machine": "aarch64"}, [PYTHON, "warning aarch64: only x86_64 is tested", HAS]),
        (
            "python",
            {"packages": {**PACKAGES, "mpi4py": ""}},
            [PYTHON, f"error mpi4py is not installed -> {install('mpi4py>=4.0')}"],
        ),
        (
            "python",
            {"packages": {**PACKAGES, "numpy": "1.26.4"}},
            [PYTHON, f"error numpy 1.26.4 is too old -> {install('numpy>=2.0')}", "ok numpy 1.26.4"],
        ),
        ("kernels", {"answer": Answer("", "")}, ["ok fused kernels"]),
        ("kernels", {"answer": Answer("install a C compiler", "")}, ["note slower: install a C compiler"]),
        ("kernels", {"answer": Answer(None, "ModuleNotFoundError: numpy")}, []),
        ("threads", {}, [CORES, UNSET]),
        ("threads", {"cores": 1}, ["ok 1 core of this machine's 8", UNSET]),
        ("threads", {"quota": 2.0}, ["warning control group allows 2 at a time -> OMP_NUM_THREADS=1", UNSET]),
        ("threads", {"quota": 16.0}, [CORES, UNSET]),
        ("threads", {"load": 9.0}, [CORES, UNSET, "note busy (9.0 processes on 8 cores)"]),
        ("threads", {"chosen": {"OMP_NUM_THREADS": "4,2"}}, [CORES, "ok OMP_NUM_THREADS=4,2 in every rank"]),
        (
            "threads",
            {"quota": 2.5, "chosen": {"OPENBLAS_NUM_THREADS": "4"}},
            ["warning allows 2.5 -> export", "warning OPENBLAS_NUM_THREADS=4, with 2 cores -> unset OPENBLAS"],
        ),
        ("threads", {"chosen": {"MKL_NUM_THREADS": "many"}}, [CORES, "warning =many is no number -> unset MKL_NUM"]),
        ("memory", {}, [ROOM, SHM]),
        ("memory", {"available": 200 * MIB}, ["warning 200 MiB of memory free, of 16.0 GiB -> ps ", SHM]),
        ("memory", {"limit": 3 * GIB, "used": GIB}, ["ok 2.0 GiB of memory free, of the 3.0 GiB that", SHM]),
        ("memory", {"limit": GIB, "used": 2 * GIB}, ["warning 0 KiB of memory free, of the 1.0 GiB -> ps ", SHM]),
        ("memory", {"limit": 12 * GIB, "used": GIB}, [ROOM, SHM]),
        ("memory", {"shm": None}, [ROOM, "warning /dev/shm is not there -> sudo mount -t tmpfs"]),
        ("memory", {"shm": 64 * MIB, "container": True}, [ROOM, "warning /dev/shm has 64 MiB -> docker run --shm"]),
        ("memory", {"shm": 64 * MIB}, [ROOM, "warning /dev/shm has 64 MiB -> sudo mount -o remount"]),
        ("memory", {"shm_free": MIB}, [ROOM, "warning /dev/shm is full (1 MiB free of 8.0 GiB) -> ls "]),
        ("limits", {}, [FILES, TMP]),
        ("limits", {"files": None}, ["ok any number of files open", TMP]),
        ("limits", {"files": 64}, ["warning only 64 files open -> ulimit -n 4096", TMP]),
        ("limits", {"files": 64, "files_hard": 64}, ["warning only 64 files -> sudo prlimit", TMP]),
        ("limits", {"processes": 100}, [FILES, "warning only 100 processes -> ulimit -u", TMP]),
        ("limits", {"infiniband": True}, [FILES, "warning only 8 MiB of memory may be -> ulimit -l", TMP]),
        ("limits", {"infiniband": True, "locked": None}, [FILES, TMP]),
        ("limits", {"room": None}, [FILES, "error no temporary file can be made in /tmp -> export TMPDIR="]),
        ("limits", {"room": None, "folder": "/x"}, [FILES, "error can be made in /x -> unset TMPDIR"]),
        ("limits", {"room": MIB}, [FILES, "warning /tmp has 1 MiB free -> export TMPDIR="]),
    ],
)
def test_facts_are_judged(check: str, change: dict[str, Any], expected: list[Any], assert_found: Any) -> None:
    judge = getattr(machine, f"judge_{check}")
    assert_found(judge(**{**GOOD[check], **change}), *expected)


BLAS = {"name": "scipy-openblas", "version": "0.3.31", "threads": 2, "right": True}
SHARES = {"unsupported": "", "trouble": ""}


@pytest.mark.parametrize(
    ("judge", "value", "expected"),
    [
        ("blas", BLAS, "ok scipy-openblas 0.3.31, 2 threads in this process; bfloat16 works"),
        ("blas", {**BLAS, "name": "", "version": "", "threads": None}, "ok an unknown BLAS; bfloat16"),
        ("blas", {**BLAS, "name": "none", "version": ""}, "warning not optimized -> --only-binary"),
        ("blas", {**BLAS, "right": False}, "error wrong numbers -> --force-reinstall numpy"),
        ("blas", "ImportError: libgfortran.so.5", "error ImportError: libgfortran.so.5 -> --force-reinstall"),
        ("sharing", SHARES, "ok ranks can share memory"),
        ("sharing", {**SHARES, "unsupported": "no order of stores on aarch64"}, "note aarch64"),
        ("sharing", {**SHARES, "trouble": "[Errno 13] Permission denied"}, "warning Errno 13 -> hidepid=0"),
        ("sharing", {**SHARES, "trouble": "[Errno 12] no memory"}, "warning Errno 12"),
        ("sharing", "died", "warning (died)"),
        ("blas", "ModuleNotFoundError: No module named 'numpy'", None),  # which another check names
        ("sharing", "ModuleNotFoundError: No module named 'numpy'", None),
    ],
)
def test_answers_are_judged(judge: str, value: Any, expected: Any, assert_found: Any) -> None:
    answer = Answer(None, value) if isinstance(value, str) else Answer(value, "")
    assert_found(getattr(machine, f"judge_{judge}")(answer), *([expected] if expected else []))


def test_files_of_killed_jobs(assert_found: Any) -> None:
    assert_found(machine.judge_stale_segments(0, 0, 8 * GIB))
    assert_found(
        machine.judge_stale_segments(1, 2 * MIB, 8 * GIB), "note 1 file (2 MiB) in /dev/shm -> ddp-doctor sweep"
    )
    assert_found(machine.judge_stale_segments(9, 3 * GIB, 8 * GIB), "warning 9 files (3.0 GiB) -> ddp-doctor sweep")


@pytest.mark.parametrize(
    ("groups", "files", "quota", "limit"),
    [
        ("", {}, None, (None, 0)),
        ("0::/a/b", {"a/memory.max": "1000", "a/memory.current": "10", "a/b/memory.max": "max"}, None, (1000, 10)),
        ("0::/a", {"memory.max": "500", "memory.current": "400", "a/memory.max": "90"}, None, (90, 0)),
        ("0::/a", {"cpu.max": "800000 100000", "a/cpu.max": "150000 100000"}, 1.5, (None, 0)),
        ("0::/a", {"a/cpu.max": "max 100000"}, None, (None, 0)),
        ("4:memory:/a", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None, (None, 0)),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "7", "memory/a/memory.usage_in_bytes": "3"}, None, (7, 3)),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0, (None, 0)),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "10"}, None, (None, 0)),
    ],
)
def test_limits_of_a_control_group(
    groups: str, files: dict[str, str], quota: float | None, limit: tuple[int | None, int], tmp_path: Path
) -> None:
    for name, text in {"groups": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    if not groups:
        (tmp_path / "groups").unlink()
    places = {"groups": str(tmp_path / "groups"), "root": str(tmp_path)}
    assert machine.quota(**places) == quota
    assert machine.memory_limit(**places) == limit


def test_sizes() -> None:
    sizes = (0, 3 << 10, 64 << 20, 1023 << 20, 3 << 29)
    assert [*map(machine.size, sizes)] == ["0 KiB", "3 KiB", "64 MiB", "1023 MiB", "1.5 GiB"]


def test_only_unused_segments_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    stale = partial(remove_stale_segments, 0.0, dry_run=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a file system that grants leases
        paths = [Path(folder, name) for name in ("mpich_shm_1_0", "sm_segment.host.0.1.0", "mpich_shm_2_0", "mine")]
        for path in paths:
            path.write_bytes(bytes(mmap.PAGESIZE))
        with open(paths[2], "r+b") as file:
            held = mmap.mmap(file.fileno(), 0)
        assert stale(folder) == (2, 2 * mmap.PAGESIZE)
        assert machine.sweep(folder) == 0
        assert [path.exists() for path in paths] == [False, False, True, True]
        assert "2 files of killed MPI jobs removed" in capsys.readouterr().out
        held.close()
        assert stale(folder)[0] == 1
    assert stale("/nonexistent") == (0, 0)
