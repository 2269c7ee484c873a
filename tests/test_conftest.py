"""What the summary of a run says of skipped tests, what jobs find, which MPI starts ranks, and what a test leaves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from launcher.engines import mpiexec
from launcher.engines.mpiexec import find_mpiexec_for
from tests.conftest import ROOT, STANDINS, Run, describe_skips, has_mpich


def test_the_summary_says_what_skipped_tests_need_and_how_to_run_them() -> None:
    reasons = [
        "Skipped: PyTorch is the oracle here",
        "Skipped: could not import 'torch': No module named 'torch'",
        "Skipped: CuPy is not installed",
        "Skipped: NVRTC is not installed",
        "Skipped: could not import 'safetensors.numpy': No module named 'safetensors'",
        "Skipped: takes Open MPI",
    ]
    assert describe_skips(reasons) == (
        "6 skipped, a file that needs something as a whole counted once. Missing: PyTorch and safetensors (3), "
        "a GPU and its libraries (1), NVRTC (1), something else: -rs says what (1). "
        "4 of them run after: pip install -e '.[oracle,nvrtc]'"
    )
    assert "run after" not in describe_skips(["Skipped: there is no GPU"])


def test_jobs_find_what_this_process_finds(monkeypatch: pytest.MonkeyPatch, run_job: Run) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    show = [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"]
    assert run_job(show).stdout == f"{STANDINS}:{ROOT}:/theirs\n"
    assert run_job(show, env={"PYTHONPATH": "/mine"}).stdout == "/mine:/theirs\n"


def test_the_mpi_is_the_one_that_the_launcher_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # On PATH, and not beside this Python, as `pip install --prefix` leaves it.
    for name in ("mpiexec", "hydra_pmi_proxy"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(find_mpiexec_for, "__defaults__", (os.environ, "/nowhere/python"))
    monkeypatch.setattr(mpiexec, "mpi_library", lambda folders, environ: None)
    assert has_mpich()
    assert request.getfixturevalue("mpiexec") == [str(tmp_path / "mpiexec")]


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_signal_handler_does_not_outlive_its_test(turn: str) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
