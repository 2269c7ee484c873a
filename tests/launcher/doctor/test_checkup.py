"""The whole of `ddp-doctor`: on the machine that runs the tests, and on one that has been broken."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import checkup
from launcher.doctor.findings import Finding, Level, error, note, ok, warning
from launcher.doctor.ranks import Trial, trials
from launcher.network import Host

DOCTOR = [sys.executable, "-m", "launcher.doctor"]


@pytest.mark.mpi
def test_a_machine_that_can_train(run_job: Any, mpiexec: list[str]) -> None:
    done = run_job(DOCTOR, timeout=100)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "colours are for terminals"
    lines = done.stdout.splitlines()
    checks = [line.split()[0] for line in lines[2:-1] if line and not line.startswith(" ")]
    assert checks[:8] == ["python", "threads", "mpi", "memory", "limits", "gpu", "ranks", "speed"]
    assert "10 collectives give the right numbers in 7 dtypes" in done.stdout
    assert done.stdout.count("all_reduce (2 ranks)") >= 4
    assert done.stdout.count(" us  ") * 4 == done.stdout.count("all_reduce") * 3, "four bytes have no bandwidth"
    assert lines[-1].startswith("this machine can train")
    assert lines[-1].endswith(" s)")


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment whose mpi4py dies when it is loaded, whose NumPy is not whole, and that wants too many threads."""
    for name, text in (
        ("mpi4py", "import os; os.abort()"),
        ("numpy", "raise ImportError('libgfortran.so.5 is missing')"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    root = Path(__file__).parents[3]
    return {"PYTHONPATH": f"{tmp_path}:{root}", "OMP_NUM_THREADS": "99999"}


def test_a_machine_that_is_broken(run_job: Any, broken: dict[str, str], mpiexec: list[str]) -> None:
    done = run_job([*DOCTOR, "--json"], timeout=100, env=broken)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert told["can_train"] is False
    assert told["verdict"].startswith("training would fail: 2 errors, ")
    assert 0 < told["seconds"] < 90
    errors = {each["text"]: each["fix"] for each in told["findings"] if each["level"] == "error"}
    assert list(errors) == [
        "NumPy does not work here: ImportError: libgfortran.so.5 is missing",
        "mpi4py cannot load an MPI: the process that tried died of SIGABRT",
    ]
    assert all("pip install" in fix for fix in errors.values())
    assert {
        "check": "ranks",
        "level": "note",
        "text": "none were started: fix the errors above first",
        "fix": "",
    } in told["findings"]
    (threads,) = [each for each in told["findings"] if each["text"].startswith("OMP_NUM_THREADS=99999")]
    assert (threads["level"], threads["fix"]) == ("warning", "unset OMP_NUM_THREADS")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_it_has_started_ends_with_it(start_job: Any, tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "import pathlib, time; pathlib.Path('there').touch(); time.sleep(99)"
    )
    root = Path(__file__).parents[3]
    job = start_job(DOCTOR, env={"PYTHONPATH": f"{tmp_path}:{root}"}, cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not (tmp_path / "there").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.process.send_signal(number)
    done: subprocess.CompletedProcess[str] = job.wait(timeout=10)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("found", "tried", "expected"),
    [
        ([ok("mpi", "x")], [ok("ranks", "x")], ["ok"]),
        ([error("mpi", "x")], [], ["note"]),
        ([warning("memory", "x")], [error("ranks", "x")], ["error", "note"]),
        ([note("memory", "x")], [error("ranks", "x")], ["error"]),
    ],
)
def test_when_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, found: list[Finding], tried: list[Finding], expected: list[str]
) -> None:
    monkeypatch.setattr("launcher.doctor.ranks.check", lambda trial: list(tried))
    monkeypatch.setattr("launcher.doctor.ranks.trials", lambda broken, **facts: [] if broken else [Trial(2)])
    (levels,) = [[each.level.value for each in findings] for findings in checkup._ranks(found, 0, ())]
    assert levels == expected


ALL = {"mpiexec": True, "tasks": 0, "gpus": 0, "hosts": ()}
HOSTS = (Host("a", 4), Host("b", 4), Host("c", 1))


@pytest.mark.parametrize(
    ("broken", "change", "expected"),
    [
        ((), {}, [Trial(2)]),
        (("memory", "gpu", "hosts"), {}, [Trial(2)]),
        (("mpi",), {"gpus": 8, "hosts": HOSTS, "tasks": 4}, []),
        ((), {"tasks": 1}, [Trial(2)]),
        ((), {"tasks": 4}, [Trial(2), Trial(2, "slurm")]),
        ((), {"tasks": 4, "mpiexec": False}, [Trial(2, "slurm")]),
        ((), {"tasks": 1, "mpiexec": False}, []),
        ((), {"gpus": 8}, [Trial(2), Trial(2, "nccl")]),
        ((), {"gpus": 1}, [Trial(2), Trial(1, "nccl")]),
        ((), {"gpus": 1, "mpiexec": False}, [Trial(1, "nccl")]),
        ((), {"gpus": 2, "mpiexec": False}, []),
        (("gpu",), {"gpus": 8}, [Trial(2)]),
        ((), {"hosts": HOSTS}, [Trial(2), Trial(3, "hosts", HOSTS)]),
        ((), {"hosts": HOSTS[:1]}, [Trial(2)]),
        (("hosts",), {"hosts": HOSTS}, [Trial(2)]),
    ],
)
def test_which_ranks_are_started(broken: tuple[str, ...], change: dict[str, Any], expected: list[Trial]) -> None:
    assert trials(set(broken), **{**ALL, **change}) == expected


def test_a_check_that_fails_by_itself_is_no_error() -> None:
    def fails() -> list[Finding]:
        raise KeyError("MemTotal")

    (finding,) = checkup._guarded("memory", fails)
    assert (finding.check, finding.level) == ("memory", Level.WARNING)
    assert "KeyError: 'MemTotal'" in finding.text
