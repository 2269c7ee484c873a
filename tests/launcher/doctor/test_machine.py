"""Facts about a machine, made up, and what the doctor makes of them: no test here depends on the machine it runs on."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import limits, memory, python, shm_cleanup, threads
from launcher.doctor.findings import Finding, Level, install
from launcher.doctor.probe import Answer

MIB, GIB = 1 << 20, 1 << 30
Expected = tuple[Level, str, str]


def assert_found(findings: list[Finding], *expected: Expected) -> None:
    """Each has this level, and these words in its text and in its fix; an empty fix is an empty fix."""
    assert [each.level for each in findings] == [level for level, _, _ in expected], findings
    for each, (_, text, fix) in zip(findings, expected, strict=True):
        assert text in each.text
        assert fix in each.fix
        assert bool(fix) == bool(each.fix)


OK, NOTE, WARNING, ERROR = Level
PACKAGES = {"numpy": "2.4.6", "ml_dtypes": "0.6.0", "mpi4py": "4.1.2"}
PYTHON = python.Python((3, 11, 7), "/venv/bin/python", "Linux", "x86_64", PACKAGES)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(OK, "Python 3.11.7, /venv/bin/python", ""), (OK, "numpy 2.4.6, ml_dtypes 0.6.0, mpi4py 4.1.2", "")]),
        ({"version": (3, 9, 1)}, [(ERROR, "3.10 is the oldest", "venv"), (OK, "numpy", "")]),
        ({"version": (3, 15, 0)}, [(NOTE, "newer than", ""), (OK, "numpy", "")]),
        ({"system": "Darwin"}, [(OK, "Python", ""), (ERROR, "this is Darwin", ""), (OK, "numpy", "")]),
        (
            {"machine": "aarch64"},
            [(OK, "Python", ""), (WARNING, "this is aarch64: only x86_64 is tested", ""), (OK, "numpy", "")],
        ),
        (
            {"packages": {**PACKAGES, "mpi4py": ""}},
            [(OK, "Python", ""), (ERROR, "mpi4py is not installed", install("mpi4py>=4.0"))],
        ),
        (
            {"packages": {**PACKAGES, "numpy": "1.26.4"}},
            [(OK, "Python", ""), (ERROR, "numpy 1.26.4 is too old", install("numpy>=2.0")), (OK, "numpy 1.26.4", "")],
        ),
    ],
)
def test_python(change: dict[str, Any], expected: list[Expected]) -> None:
    assert_found(python.judge(PYTHON._replace(**change)), *expected)


THREADS = threads.Threads(cores=8, machine=8, quota=None, load=0.5, chosen={})
UNSET = (OK, "OMP_NUM_THREADS is not set", "")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(OK, "8 cores", ""), UNSET]),
        ({"cores": 1}, [(OK, "1 core of this machine's 8", ""), UNSET]),
        ({"quota": 2.0}, [(WARNING, "8 cores, but the control group allows 2 at a time", "OMP_NUM_THREADS=1"), UNSET]),
        ({"quota": 16.0}, [(OK, "8 cores", ""), UNSET]),
        ({"load": 9.0}, [(OK, "8 cores", ""), UNSET, (NOTE, "busy (9.0 processes on 8 cores)", "")]),
        ({"chosen": {"OMP_NUM_THREADS": "4"}}, [(OK, "8 cores", ""), (OK, "OMP_NUM_THREADS=4 in every rank", "")]),
        ({"chosen": {"OMP_NUM_THREADS": "4,2"}}, [(OK, "8 cores", ""), (OK, "OMP_NUM_THREADS=4,2", "")]),
        (
            {"chosen": {"OMP_NUM_THREADS": "64"}},
            [(OK, "8 cores", ""), (WARNING, "OMP_NUM_THREADS=64, with 8 cores", "unset OMP_NUM_THREADS")],
        ),
        (
            {"quota": 2.5, "chosen": {"OPENBLAS_NUM_THREADS": "4"}},
            [(WARNING, "allows 2.5", "export"), (WARNING, "OPENBLAS_NUM_THREADS=4, with 2 cores", "unset")],
        ),
        (
            {"chosen": {"MKL_NUM_THREADS": "many"}},
            [(OK, "8 cores", ""), (WARNING, "MKL_NUM_THREADS=many is no number", "unset MKL_NUM_THREADS")],
        ),
    ],
)
def test_threads(change: dict[str, Any], expected: list[Expected]) -> None:
    assert_found(threads.judge(THREADS._replace(**change)), *expected)


BLAS = {"name": "scipy-openblas", "version": "0.3.31", "threads": 2, "right": True}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(BLAS, ""), (OK, "scipy-openblas 0.3.31, 2 threads in this process; bfloat16 works", "")),
        (Answer({**BLAS, "threads": None}, ""), (OK, "scipy-openblas 0.3.31; bfloat16 works", "")),
        (Answer({**BLAS, "name": "", "version": ""}, ""), (OK, "a BLAS that does not say its name", "")),
        (Answer({**BLAS, "name": "none", "version": ""}, ""), (WARNING, "not optimized", "--only-binary")),
        (Answer({**BLAS, "right": False}, ""), (ERROR, "wrong numbers", "--force-reinstall numpy")),
        (Answer(None, "ImportError: libgfortran.so.5"), (ERROR, "ImportError: libgfortran.so.5", "--force-reinstall")),
    ],
)
def test_blas(answer: Answer, expected: Expected) -> None:
    assert_found(threads.judge_blas(answer), expected)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "800000 100000\n", "cpu,cpuacct/cpu.cfs_quota_us": "50000\n"}, 8.0),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group(files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.quota(str(tmp_path)) == cores


MEMORY = memory.Memory(
    total=16 * GIB, available=8 * GIB, limit=None, used=0, shm=8 * GIB, shm_free=8 * GIB, container=False
)
ROOM, SHM = (OK, "8.0 GiB of memory free, of 16.0 GiB", ""), (OK, "/dev/shm has 8.0 GiB free of 8.0 GiB", "")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [ROOM, SHM]),
        ({"available": 200 * MIB}, [(WARNING, "200 MiB of memory free, of 16.0 GiB", "ps "), SHM]),
        (
            {"limit": 3 * GIB, "used": GIB},
            [(OK, "2.0 GiB of memory free, of the 3.0 GiB that the control group", ""), SHM],
        ),
        ({"limit": GIB, "used": 2 * GIB}, [(WARNING, "0 KiB of memory free, of the 1.0 GiB", "ps "), SHM]),
        ({"limit": 12 * GIB, "used": GIB}, [ROOM, SHM]),
        ({"shm": None, "shm_free": 0}, [ROOM, (WARNING, "/dev/shm is not there", "sudo mount -t tmpfs")]),
        ({"shm": 64 * MIB, "container": True}, [ROOM, (WARNING, "/dev/shm has 64 MiB", "docker run --shm-size")]),
        ({"shm": 64 * MIB}, [ROOM, (WARNING, "/dev/shm has 64 MiB", "sudo mount -o remount")]),
        ({"shm_free": MIB}, [ROOM, (WARNING, "/dev/shm is full (1 MiB free of 8.0 GiB)", "ls ")]),
    ],
)
def test_memory(change: dict[str, Any], expected: list[Expected]) -> None:
    assert_found(memory.judge(MEMORY._replace(**change)), *expected)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"files": 0, "nbytes": 0}, []),
        ({"files": 1, "nbytes": 2 * MIB}, [(NOTE, "1 file (2 MiB) in /dev/shm", "ddp-doctor sweep")]),
        ({"files": 9, "nbytes": 3 * GIB}, [(WARNING, "9 files (3.0 GiB) in /dev/shm", "ddp-doctor sweep")]),
        (None, []),
    ],
)
def test_leftovers(said: Any, expected: list[Expected]) -> None:
    assert_found(memory.judge_stale_segments(Answer(said, ""), 8 * GIB), *expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer({"unsupported": "", "trouble": ""}, ""), (OK, "ranks can share memory", "")),
        (
            Answer({"unsupported": "the order of stores is not kept on aarch64", "trouble": ""}, ""),
            (NOTE, "aarch64", ""),
        ),
        (
            Answer({"unsupported": "", "trouble": "[Errno 13] Permission denied"}, ""),
            (WARNING, "Errno 13", "hidepid=0"),
        ),
        (Answer({"unsupported": "", "trouble": "[Errno 12] no memory"}, ""), (WARNING, "Errno 12", "")),
        (Answer(None, "died"), (WARNING, "(died)", "")),
    ],
)
def test_sharing_memory(answer: Answer, expected: Expected) -> None:
    assert_found(memory.judge_sharing(answer), expected)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/memory.current": "10", "a/b/memory.max": "max"}, (1000, 10)),
        (
            "0::/a\n",
            {"memory.max": "500", "memory.current": "400", "a/memory.max": "90", "a/memory.current": "0"},
            (90, 0),
        ),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, (None, 0)),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "70", "memory/a/memory.usage_in_bytes": "7"}, (70, 7)),
        ("", {}, (None, 0)),
    ],
)
def test_the_memory_of_a_control_group(
    groups: str, files: dict[str, str], limit: tuple[int | None, int], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "groups").write_text(groups)
    assert memory.cgroup(str(tmp_path / "groups"), str(tmp_path)) == limit


LIMITS = limits.Limits(
    files=1024,
    files_hard=4096,
    processes=None,
    locked=8 * MIB,
    infiniband=False,
    folder="/tmp",
    room=GIB,
    writable=True,
    clock=1e-7,
    source="tsc",
    year=2026,
)
FILES, TMP = (OK, "1024 files open", ""), (OK, "/tmp has 1.0 GiB free", "")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [FILES, TMP]),
        ({"files": None}, [(OK, "any number of files open", ""), TMP]),
        ({"files": 64}, [(WARNING, "only 64 files open", "ulimit -n 4096"), TMP]),
        ({"files": 64, "files_hard": 1024}, [(WARNING, "only 64 files", "ulimit -n 1024"), TMP]),
        ({"files": 64, "files_hard": 64}, [(WARNING, "only 64 files", "sudo prlimit"), TMP]),
        ({"processes": 100}, [FILES, (WARNING, "only 100 processes", "ulimit -u"), TMP]),
        ({"infiniband": True}, [FILES, (WARNING, "only 8 MiB of memory may be locked", "ulimit -l unlimited"), TMP]),
        ({"infiniband": True, "locked": None}, [FILES, TMP]),
        ({"writable": False}, [FILES, (ERROR, "no temporary file can be made in /tmp", "export TMPDIR=")]),
        ({"writable": False, "folder": "/x"}, [FILES, (ERROR, "can be made in /x", "unset TMPDIR")]),
        ({"room": MIB}, [FILES, (WARNING, "/tmp has 1 MiB free", "export TMPDIR=")]),
        ({"clock": 4e-6, "source": "hpet"}, [FILES, TMP, (WARNING, "takes 4.0 us (its source is hpet)", "echo tsc")]),
        ({"clock": 4e-6}, [FILES, TMP, (WARNING, "takes 4.0 us", "")]),
        ({"year": 1970}, [FILES, TMP, (WARNING, "it is 1970", "timedatectl")]),
    ],
)
def test_limits(change: dict[str, Any], expected: list[Expected]) -> None:
    assert_found(limits.judge(LIMITS._replace(**change)), *expected)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 KiB"), (3 << 10, "3 KiB"), (64 << 20, "64 MiB"), (1023 << 20, "1023 MiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert memory.size(nbytes) == text


def test_only_what_nobody_uses_is_swept(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a file system like that which is meant
        paths = [Path(folder, name) for name in ("mpich_shm_1_0", "sm_segment.host.0.1.0", "mpich_shm_2_0", "mine")]
        for path in paths:
            path.write_bytes(bytes(mmap.PAGESIZE))
        with open(paths[2], "r+b") as file:
            held = mmap.mmap(file.fileno(), 0)
        assert shm_cleanup.look(folder) == (2, 2 * mmap.PAGESIZE)
        assert shm_cleanup.sweep(folder) == 0
        assert [path.exists() for path in paths] == [False, False, True, True]
        assert "2 files of killed MPI jobs removed" in capsys.readouterr().out
        held.close()
        assert shm_cleanup.look(folder).files == 1


def test_there_may_be_no_shared_memory_at_all() -> None:
    assert shm_cleanup.look("/nonexistent") == (0, 0)


def test_this_machine_has_facts() -> None:
    assert python.look().packages["numpy"]
    assert 1 <= threads.look().cores <= threads.look().machine
    assert 0 < memory.look().available <= memory.look().total
    assert 0 < limits.look().clock < 1e-3
    assert limits.look().year >= 2026
    assert os.access(limits.look().folder, os.W_OK) == limits.look().writable


def test_what_is_not_installed_is_said_once() -> None:
    missing = Answer(None, "ModuleNotFoundError: No module named 'numpy'")
    assert threads.judge_blas(missing) == []
    assert memory.judge_sharing(missing) == []
