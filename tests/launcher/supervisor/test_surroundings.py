"""What a job is started in may be odd: signals that its parent ignored, processes that it may not look at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, has_mpich
from tests.launcher.conftest import LAUNCH

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
LIMIT = 60.0  # s

# What is ignored stays so through exec.
DEAF = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
]


def test_a_parent_that_ignored_its_childrens_end(run_job: Any, script: Callable[[str], str]) -> None:
    path = script("print(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)")
    done = run_job([*DEAF, *LAUNCH, "-n", "2", path], LIMIT)
    assert (done.returncode, sorted(done.stdout.split("\n")), done.stderr) == (0, ["", "0: True", "1: True"], "")


NO_MORE_PROCESSES = r".+ lets this user start no more processes \(Resource temporarily unavailable; see ulimit -u\)"
NEEDS = r"MPICH needs 10 MiB of shared memory for 2 ranks on this machine, and"
NO_LOOPBACK = r"127\.0\.0\.1 cannot be used \(.+\): is the interface lo up\? \(ip link set lo up\)"


def as_nobody(processes: int) -> list[str]:
    """Runs a command as a user of its own, who may read all files and have so many processes."""
    user = str(100_000 + os.getpid())
    files = "+dac_override,+dac_read_search"
    rights = ["--clear-groups", f"--inh-caps={files}", f"--ambient-caps={files}"]
    return ["setpriv", "--reuid", user, "--regid", user, *rights, "prlimit", f"--nproc={processes}"]


def small_shm(options: str) -> list[str]:
    """Runs a command with a /dev/shm of its own."""
    line = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", line, "sh"]


@pytest.mark.root
@pytest.mark.parametrize(
    ("around", "ranks", "says"),
    [
        (as_nobody(1), 2, NO_MORE_PROCESSES),  # the reaper
        (as_nobody(2), 1, NO_MORE_PROCESSES),  # what the reaper starts
        (as_nobody(3), 1, NO_MORE_PROCESSES),  # the rank
        (["unshare", "--net"], 2, NO_LOOPBACK),
        (small_shm("size=6m"), 2, rf"{NEEDS} /dev/shm has 6 MiB free, enough for 1: mount -o remount,size=1g .+"),
        (small_shm("ro"), 2, rf"{NEEDS} /dev/shm is missing, read-only or not this user's: mount -t .+"),
        (["prlimit", "--fsize=500000"], 2, rf"{NEEDS} no file may be larger than 488 KiB: ulimit -f unlimited"),
        (
            ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"],
            2,
            "/proc is empty, and ranks are watched with it: mount -t proc proc /proc",
        ),
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
    done = run_job([*around, *LAUNCH, "-n", str(ranks), "-m", "this"], LIMIT, env={"TMPDIR": str(files), "PATH": path})
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"ddp-launch: {says}\n", done.stderr), done.stderr
    assert list(files.iterdir()) == []


def test_a_working_folder_that_has_been_removed(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('well')\n")
    (tmp_path / "gone").mkdir()
    line = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone")]
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = run_job([*line, *LAUNCH, "--events", str(tmp_path / "events"), "-m", "job"], LIMIT, env=environ)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert json.loads((tmp_path / "events").read_text().splitlines()[0])["cwd"] == ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know it")
def test_a_safe_path(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "theirs.py").write_text("value = 7\n")
    (tmp_path / "json.py").write_text("")  # what a safe path keeps out
    code = "import json, sys, theirs\nprint(json.dumps([theirs.value, sys.path]))\n"
    (tmp_path / "job.py").write_text(code)
    environ = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tmp_path}/libs{os.pathsep}{ROOT}"}
    plain = run_job([sys.executable, "job.py"], LIMIT, env=environ, cwd=tmp_path)
    assert plain.stderr == ""
    done = run_job([*LAUNCH, "job.py"], LIMIT, env=environ, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")
