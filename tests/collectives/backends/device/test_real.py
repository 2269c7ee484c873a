"""The same on a real GPU, with the real CuPy and NCCL: a world of one, and two ranks that share the GPU.

Two ranks on one GPU go over host memory; over NCCL only where the library lets ranks share (2.30 and newer).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collectives.backends.device import cuda
from collectives.backends.nccl import library
from collectives.errors import CollectivesError
from tests.conftest import Run

HERE = Path(__file__).parent
#: Collectives, and a training under DataParallel.
SCRIPTS = HERE / "on_gpu.py", HERE.parents[2] / "ddp" / "parallel" / "gpu" / "on_gpu.py"

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.parametrize("script", SCRIPTS, ids=str)]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    absent = cuda.why_absent()
    if absent is not None:
        pytest.skip(absent)
    try:
        cuda.load()
    except CollectivesError as error:
        pytest.skip(str(error))


@pytest.fixture
def nccl() -> tuple[int, ...]:
    """The version of the NCCL that is installed."""
    try:
        return library.load().version
    except CollectivesError as error:
        pytest.skip(str(error))


def kept(done: subprocess.CompletedProcess[str], size: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" kept") == size


def test_a_world_of_one_copies(run_job: Run, script: Path) -> None:
    kept(run_job([sys.executable, str(script), "auto", "single"], timeout=280), 1)


def test_a_world_of_one_over_nccl(run_job: Run, script: Path, nccl: tuple[int, ...]) -> None:
    kept(run_job([sys.executable, str(script), "nccl", "NCCL"], timeout=280), 1)


@pytest.mark.mpi
def test_two_ranks_on_one_gpu_over_host_memory(run_job: Run, script: Path, mpiexec: list[str]) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    kept(run_job([*mpiexec, "-n", "2", sys.executable, str(script), "auto", "host memory"], timeout=280, env=env), 2)


@pytest.mark.mpi
def test_two_ranks_on_one_gpu_over_nccl(run_job: Run, script: Path, mpiexec: list[str], nccl: tuple[int, ...]) -> None:
    if nccl[:2] < (2, 30):
        pytest.skip("this NCCL does not let ranks share a GPU")
    env = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    kept(run_job([*mpiexec, "-n", "2", sys.executable, str(script), "nccl", "NCCL"], timeout=280, env=env), 2)
