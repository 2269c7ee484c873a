"""The same on a real GPU, with the real CuPy and NCCL: a world of one, and two ranks that share the GPU.

Two ranks on one GPU go over host memory; over NCCL only where the library lets ranks share (2.30 and newer).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.backends.device import cuda
from collectives.backends.nccl import library
from collectives.errors import CollectivesError

SCRIPT = Path(__file__).with_name("on_gpu.py")
Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    absent = cuda.why_absent()
    if absent is not None:
        pytest.skip(absent)
    try:
        cuda.load()
    except CollectivesError as error:
        pytest.skip(str(error))


def kept(done: subprocess.CompletedProcess[str], size: int) -> None:
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gradients kept") == size


def test_a_world_of_one(run_job: Run) -> None:
    kept(run_job([sys.executable, str(SCRIPT), "auto", "single"], timeout=240), 1)


@pytest.mark.mpi
def test_two_ranks_on_one_gpu_over_host_memory(run_job: Run, mpiexec: list[str]) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    kept(run_job([*mpiexec, "-n", "2", sys.executable, str(SCRIPT), "auto", "host memory"], timeout=280, env=env), 2)


@pytest.mark.mpi
def test_two_ranks_on_one_gpu_over_nccl(run_job: Run, mpiexec: list[str]) -> None:
    try:
        version = library.load().version
    except CollectivesError as error:
        pytest.skip(str(error))
    if version[:2] < (2, 30):
        pytest.skip("this NCCL does not let ranks share a GPU")
    env = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    kept(run_job([*mpiexec, "-n", "2", sys.executable, str(SCRIPT), "nccl", "NCCL"], timeout=280, env=env), 2)
