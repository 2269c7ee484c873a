"""Tests that run in a job of MPI's: a test starts it, and every rank runs those of a file whose names say so.

The contract's files are no test files themselves, and their asserts should say as much as those of one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.collectives.contract")

# What they do without takes longer to import than many of them to run.
_WITHOUT = [f"-pno:{plugin}" for plugin in ("cacheprovider", "hypothesispytest", "anyio", "xdist")]
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", *_WITHOUT]


@pytest.fixture
def hold_over_mpi(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], request: pytest.FixtureRequest
) -> Callable[..., None]:
    """`hold_over_mpi([__file__], "TestMPI", 3)`: those tests of the files pass on each of three ranks."""

    def hold(files: Sequence[str | Path], names: str, size: int, timeout: float = 220) -> None:
        long = ["--long"] if request.config.getoption("--long") else []
        done = run_job([*mpiexec, "-n", str(size), *_PYTEST, *long, *files, "-k", names], timeout=timeout, code=0)
        assert done.stdout.count(" passed") == size

    return hold


@pytest.fixture
def run_script(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_script(text, 3, timeout=60)` runs a script of that text on three ranks of a bare engine."""

    def run(text: str, n: int = 2, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        return run_job([*mpiexec, "-n", str(n), sys.executable, str(script)], timeout=timeout)

    return run
