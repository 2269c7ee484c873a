"""Ranks over the stub libnccl: processes that are forked from one, each with a communicator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.collectives.backends.nccl.stub.build import build

BODIES = Path(__file__).with_name("bodies.py")
RunRanks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The stub's file: `stub()`, or `stub(minor=12)` for an older NCCL."""
    directory = tmp_path_factory.mktemp("stub")
    return lambda minor=32: build(directory, minor)


@pytest.fixture
def run_ranks(stub: Callable[..., Path], run_job: Callable[..., object], tmp_path: Path) -> RunRanks:
    """Runs functions of bodies.py on every rank: `run_ranks(2, "ring", "splits", minor=12, **environment)`."""

    def run(size: int, *bodies: str, minor: int = 32, fails: bool = False, **env: str) -> object:
        command = [sys.executable, str(BODIES), str(stub(minor)), str(size), *bodies]
        segments = tmp_path / "segments"
        segments.mkdir(exist_ok=True)
        done = run_job(command, timeout=60, env={"OPENBLAS_NUM_THREADS": "1", **env, "NCCL_STUB_DIR": str(segments)})
        assert isinstance(done, subprocess.CompletedProcess)
        assert (done.returncode != 0) == fails, f"{done.stdout}\n{done.stderr}"
        return done

    return run  # type: ignore[return-value]  # what `run_job` returns is checked above
