"""What a job is started in may be odd: signals that its parent ignored, processes that it may not look at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, has_mpich
from tests.launcher.conftest import LAUNCH, read_events

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

# What is ignored stays so through exec.
DEAF = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
]


def test_a_parent_that_ignored_its_childrens_end(run_job: Any, script: Any) -> None:
    path = script("print(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)")
    run_job([*DEAF, *LAUNCH, path], code=0, out="True\n", err="")


NO_MORE_PROCESSES = r".+ lets this user start no more processes \(Resource temporarily unavailable; see ulimit -u\)"
SHM = "/dev/shm"
NEEDS = r"MPICH needs 10 MiB of shared memory for 2 ranks on this machine, and"
NO_LOOPBACK = r"127\.0\.0\.1 cannot be used \(.+\): is the interface lo up\? \(ip link set lo up\)"


def as_nobody(processes: int) -> list[str]:
    """Runs a command as a user of its own, who may read all files and have so many processes."""
    user = str(100_000 + os.getpid())
    files = "+dac_override,+dac_read_search"
    rights = ["--clear-groups", f"--inh-caps={files}", f"--ambient-caps={files}"]
    return ["setpriv", "--reuid", user, "--regid", user, *rights, "prlimit", f"--nproc={processes}"]


def mounted(place: str, options: str = "rw") -> list[str]:
    """Runs a command with a file system of its own at this place."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} none {place} && exec "$@"', "sh"]


@pytest.mark.root
@pytest.mark.parametrize(
    ("around", "ranks", "says"),
    [
        (as_nobody(1), 2, NO_MORE_PROCESSES),  # the reaper
        (as_nobody(2), 1, NO_MORE_PROCESSES),  # what the reaper starts
        (as_nobody(3), 1, NO_MORE_PROCESSES),  # the rank
        (["unshare", "--net"], 2, NO_LOOPBACK),
        (mounted(SHM, "size=6m"), 2, rf"{NEEDS} {SHM} has 6 MiB free, enough for 1: mount -o remount,size=1g .+"),
        (mounted(SHM, "ro"), 2, rf"{NEEDS} {SHM} is missing, read-only or not this user's: mount -t .+"),
        (["prlimit", "--fsize=500000"], 2, rf"{NEEDS} no file may be larger than 488 KiB: ulimit -f unlimited"),
        (mounted("/proc"), 2, "/proc is empty, and ranks are watched with it: mount -t proc proc /proc"),
    ],
)
def test_a_machine_on_which_no_rank_can_run(
    run_job: Any, tmp_path: Path, around: list[str], ranks: int, says: str
) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if subprocess.run([*around, "true"], capture_output=True, env={"PATH": path}).returncode != 0:
        pytest.skip("it takes unshare and ip to make one like that")
    if says.startswith(NEEDS) and not has_mpich():
        pytest.skip("takes MPICH, which keeps what ranks share in /dev/shm")
    files = tmp_path / "files"
    files.mkdir()
    environ = {"TMPDIR": str(files), "PATH": path}
    done = run_job([*around, *LAUNCH, "-n", str(ranks), "-m", "this"], env=environ, code=2, out="")
    assert re.fullmatch(f"ddp-launch: {says}\n", done.stderr), done.stderr
    assert list(files.iterdir()) == []


def test_a_working_folder_that_has_been_removed(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('well')\n")
    (tmp_path / "gone").mkdir()
    line = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone")]
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    run_job([*line, *LAUNCH, "--events", str(tmp_path / "events"), "-m", "job"], env=environ, code=0, out="well\n")
    assert read_events(tmp_path / "events")[0]["cwd"] == ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know it")
def test_a_safe_path(run_job: Any, launch: Any, tmp_path: Path) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "theirs.py").write_text("value = 7\n")
    (tmp_path / "json.py").write_text("")  # what a safe path keeps out
    code = "import json, sys, theirs\nprint(json.dumps([theirs.value, sys.path]))\n"
    (tmp_path / "job.py").write_text(code)
    environ = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tmp_path}/libs{os.pathsep}{ROOT}"}
    plain = run_job([sys.executable, "job.py"], env=environ, cwd=tmp_path, err="")
    launch("job.py", env=environ, cwd=tmp_path, out=plain.stdout, err="")
