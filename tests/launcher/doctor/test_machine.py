"""Facts about a machine, made up, and what the doctor makes of them: no test here depends on the machine it runs on."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import machine
from launcher.doctor.findings import install
from launcher.doctor.probes import Answer
from launcher.linux import remove_stale_segments
from tests.conftest import ROOT

MIB, GIB = 1 << 20, 1 << 30
PACKAGES = {"numpy": "2.4.6", "ml_dtypes": "0.6.0", "mpi4py": "4.1.2", "threadpoolctl": "3.8.0", "tqdm": "4.67.1"}
BLAS = {"name": "scipy-openblas", "version": "0.3.31", "threads": 2, "right": True}
SHARES = {"unsupported": "", "failure": ""}
NO_NUMPY = Answer(None, "ModuleNotFoundError: No module named 'numpy'")
SHM_OF = {"shm_free": 8 * GIB, "missing": None, "stale": (0, 0)}
GOOD: dict[str, dict[str, Any]] = {
    "python": {"python": (3, 11, 7), "system": "Linux x86_64", "packages": PACKAGES, "kernels": NO_NUMPY},
    "threads": {"cores": 8, "machine": 8, "quota": None, "chosen": {}},
    "memory": {"total": 16 * GIB, "available": 8 * GIB, "limit": None, **SHM_OF},
    "limits": {"files": 1024, "folder": "/tmp", "free": GIB},
    "blas": {"answer": Answer(BLAS, "")},
    "sharing": {"answer": Answer(SHARES, "")},
}
HAS, PYTHON = "ok numpy 2.4.6, ml_dtypes 0.6.0, mpi4py 4.1.2", "ok Python 3.11.7, "
CORES, UNSET = "ok 8 cores", "ok OMP_NUM_THREADS is not set"
MEMORY = "ok 8.0 GiB of memory free, of 16.0 GiB"
SHM = "ok /dev/shm has 8.0 GiB free, enough for MPICH with 1544 ranks"
FILES, TMP = "ok 1024 files open", "ok /tmp has 1.0 GiB free"


def blas(**change: Any) -> dict[str, Answer]:
    return {"answer": Answer({**BLAS, **change}, "")}


def sharing(**change: str) -> dict[str, Answer]:
    return {"answer": Answer({**SHARES, **change}, "")}


@pytest.mark.parametrize(
    ("check", "change", "expected"),
    [
        ("python", {}, [PYTHON, HAS]),
        ("python", {"python": (3, 9, 1)}, ["error 3.10 is the oldest -> venv", HAS]),
        ("python", {"system": "Linux aarch64"}, [PYTHON, "warning aarch64: only Linux x86_64 is tested", HAS]),
        ("python", {"packages": PACKAGES | {"mpi4py": ""}}, [PYTHON, "error mpi4py is not -> install 'mpi4py>=4.0'"]),
        ("python", {"packages": PACKAGES | {"numpy": "1.26"}}, [PYTHON, "error too old -> numpy>=2.1", "ok 1.26"]),
        ("python", {"kernels": Answer("", "")}, [PYTHON, HAS, "ok fused kernels"]),
        ("python", {"kernels": Answer("no compiler", "")}, [PYTHON, HAS, "note slower: no compiler"]),
        ("threads", {}, [CORES, UNSET]),
        ("threads", {"cores": 1}, ["ok 1 core of this machine's 8", UNSET]),
        ("threads", {"quota": 2.0}, ["warning control group allows 2 at a time -> OMP_NUM_THREADS=1", UNSET]),
        ("threads", {"chosen": {"OMP_NUM_THREADS": "4,2"}}, [CORES, "ok OMP_NUM_THREADS=4,2 in every rank"]),
        ("threads", {"chosen": {"OMP_NUM_THREADS": "9"}}, [CORES, "warning =9, with 8 cores -> unset OMP_NUM"]),
        ("threads", {"chosen": {"MKL_NUM_THREADS": "many"}}, [CORES, "warning =many is not a number -> unset MKL_NUM"]),
        ("memory", {}, [MEMORY, SHM]),
        ("memory", {"available": 200 * MIB}, ["warning 200 MiB of memory free, of 16.0 GiB -> ps ", SHM]),
        ("memory", {"limit": 2 * GIB}, ["ok 2.0 GiB of memory free, that the control group leaves", SHM]),
        ("memory", {"missing": ("it is full", "mount")}, [MEMORY, "warning it is full -> mount"]),
        ("memory", {"stale": (1, MIB)}, [MEMORY, SHM, "note 1 file (1 MiB) of killed MPI jobs -> ddp-doctor sweep"]),
        ("limits", {}, [FILES, TMP]),
        ("limits", {"files": 64}, ["warning only 64 files open -> ulimit -n 4096", TMP]),
        ("limits", {"free": None}, [FILES, "error no temporary file can be made in /tmp -> export TMPDIR="]),
        ("limits", {"free": MIB}, [FILES, "warning /tmp has 1 MiB free -> export TMPDIR="]),
        ("blas", {}, ["ok scipy-openblas 0.3.31, 2 threads in this process; bfloat16 works"]),
        ("blas", blas(name="none", version=""), ["warning not optimized -> --only-binary"]),
        ("blas", blas(right=False), ["error wrong numbers -> --force-reinstall numpy"]),
        ("blas", {"answer": Answer(None, "ImportError: no")}, ["error ImportError: no -> --force-reinstall"]),
        ("sharing", {}, ["ok ranks can share memory"]),
        ("sharing", sharing(unsupported="no order of stores on aarch64"), ["note aarch64"]),
        ("sharing", sharing(failure="[Errno 13] Permission denied"), ["warning Errno 13 -> hidepid=0"]),
        ("sharing", {"answer": NO_NUMPY}, []),  # which `python` names
    ],
)
def test_facts_are_judged(check: str, change: dict[str, Any], expected: list[str], assert_found: Any) -> None:
    assert_found(getattr(machine, f"evaluate_{check}")(**{**GOOD[check], **change}), *expected)


def test_packages_are_those_of_the_installation() -> None:
    assert install("mpi4py>=4.0").endswith("-m pip install 'mpi4py>=4.0'")
    text = (ROOT / "setup.cfg").read_text()
    assert all(f"\n    {name}>={least}\n" in text for name, least in machine.NEEDED.items())


@pytest.mark.parametrize(
    ("groups", "files", "quota", "limit"),
    [
        ("", {}, None, None),
        ("0::/a/b", {"a/memory.max": "1000", "a/memory.current": "10", "a/b/memory.current": "9"}, None, 991),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "90", "cpu.max": "150000 100000"}, 1.5, None),
        ("4:memory:/a\n0::/a", {"cpu.max": "800000 100000", "a/cpu.max": "max 100000"}, 8.0, None),
    ],
)
def test_limits_of_a_control_group(
    groups: str, files: dict[str, str], quota: float | None, limit: int | None, tmp_path: Path
) -> None:
    for name, text in {"groups": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n" if text else "")
    places = {"groups": str(tmp_path / "groups"), "root": str(tmp_path)}
    assert machine.quota(**places) == quota
    assert machine.memory_limit(**places) == limit


def test_unused_segments_are_swept(capsys: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a file system that grants leases
        for name in ("mpich_shm_1_0", "sm_segment.host.0.1.0", "mine"):
            Path(folder, name).write_bytes(bytes(mmap.PAGESIZE))
        assert remove_stale_segments(0.0, folder, dry_run=True) == (2, 2 * mmap.PAGESIZE)
        assert machine.sweep(folder) == 0
        assert [path.name for path in Path(folder).iterdir()] == ["mine"]
    assert "2 files of killed MPI jobs removed" in capsys.readouterr().out
    assert remove_stale_segments(0.0, "/nonexistent", dry_run=True) == (0, 0)
