"""Device arrays over a libnccl that is loaded and called as the real one is, by ranks that are processes of an MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectives.backends.nccl.stub.build import build
from tests.conftest import Run

SCRIPT = Path(__file__).with_name("on_stub.py")


@pytest.fixture
def on_stub(run_job: Run, mpiexec: list[str], tmp_path: Path) -> Run:
    """Runs the script on `size` ranks of the stub of NCCL 2.`minor`; 0: without an engine."""

    def run(size: int, case: str, minor: int = 32) -> subprocess.CompletedProcess[str]:
        start = [*mpiexec, "-n", str(size)] if size else []
        command = [*start, sys.executable, str(SCRIPT), str(build(tmp_path, minor)), case]
        return run_job(command, timeout=60, env={"NCCL_STUB_DIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"})

    return run


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("size", "case", "minor"), [(2, "auto", 32), pytest.param(3, "nccl", 18, marks=pytest.mark.long)]
)
def test_the_contract_holds_over_a_loaded_library(on_stub: Run, size: int, case: str, minor: int) -> None:
    done = on_stub(size, case, minor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("contract kept") == size


@pytest.mark.mpi
def test_a_timeout_aborts_the_communicator_and_the_launcher_starts_again(run_job: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher", "-n", "2", "--max-restarts", "1", str(SCRIPT), str(build(tmp_path))]
    done = run_job(
        [*command, "late"], timeout=90, env={"NCCL_STUB_DIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}, code=0
    )
    assert done.stdout.count("attempt 1, 2") == 2, done.stdout
    assert "attempt 0" not in done.stdout
    assert "all_reduce" in done.stderr, "what was waited for is named"
