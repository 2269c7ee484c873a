"""The whole of `ddp-doctor`: on the machine that runs the tests, and on one that has been broken."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import checkup
from launcher.doctor.findings import Finding, ok, warning
from tests.conftest import ROOT, wait_until
from tests.launcher.console.terminal_emulator import stderr_on_a_terminal

DOCTOR = [sys.executable, "-m", "launcher.doctor"]


@pytest.mark.mpi
def test_a_machine_that_can_train(run_job: Any, mpiexec: Any) -> None:
    out = run_job(DOCTOR, timeout=100, code=0, err="").stdout
    assert "\x1b" not in out, "colours are for terminals"
    *checks, last = [line for line in out.splitlines()[2:] if line and not line.startswith(" ")]
    names = [line.split()[0] for line in checks]
    assert names[:8] == ["python", "threads", "mpi", "memory", "limits", "gpu", "ranks", "speed"]
    assert "10 collectives give the right numbers in 7 dtypes" in out
    assert out.count("all_reduce (2 ranks)") >= 4
    assert re.fullmatch("this machine can train.* s\\)", last)


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment whose mpi4py dies when it is loaded, whose NumPy is not whole, and that wants too many threads."""
    (tmp_path / "mpi4py.py").write_text("import os; os.abort()")
    (tmp_path / "numpy.py").write_text("raise ImportError('libgfortran.so.5 is missing')")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "99999"}


def test_a_machine_that_is_broken(run_job: Any, broken: Any, mpiexec: Any) -> None:
    report = json.loads(run_job([*DOCTOR, "--json"], timeout=100, env=broken, code=1, err="").stdout)
    assert report["can_train"] is False
    assert report["verdict"].startswith("training would fail: 2 errors, ")
    assert 0 < report["seconds"] < 90
    errors = {each["text"]: each["fix"] for each in report["findings"] if each["level"] == "error"}
    assert list(errors) == [
        "NumPy does not work here: ImportError: libgfortran.so.5 is missing",
        "mpi4py cannot load an MPI: the process died of SIGABRT",
    ]
    assert all("pip install" in fix for fix in errors.values())
    assert "none were started: fix the errors above first" in [each["text"] for each in report["findings"]]
    (threads,) = [each for each in report["findings"] if each["text"].startswith("OMP_NUM_THREADS=99999")]
    assert (threads["level"], threads["fix"]) == ("warning", "unset OMP_NUM_THREADS")


def test_what_it_has_started_ends_with_it(start_job: Any, tmp_path: Path) -> None:
    code = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(99)"
    (tmp_path / "mpi4py.py").write_text(code)
    job = start_job(DOCTOR, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, cwd=tmp_path)
    wait_until((tmp_path / "started").exists)
    job.process.send_signal(signal.SIGTERM)
    job.wait(10, code=143, err="")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_shows_the_check_that_is_made(as_json: bool, monkeypatch: Any, capsys: Any) -> None:
    for module, name in (
        (checkup.machine, "python threads memory limits"),
        (checkup.gpu, "check"),
        (checkup.mpi, "check"),
    ):
        for each in name.split():
            monkeypatch.setattr(module, each, lambda: [ok("fine")])
    monkeypatch.setattr(checkup.ranks, "check", lambda found, machines: [ok("fine")])
    assert checkup.checkup((), as_json) == 0
    piped = capsys.readouterr()
    assert piped.err == ""
    with stderr_on_a_terminal(60) as terminal:
        assert checkup.checkup((), as_json) == 0
        assert terminal.look() == [], "it is gone in the end"
    assert [each in terminal.raw for each in ("python:   0%|", "| 0/7", "ranks:  86%|", "| 6/7")] == 4 * [True]
    seconds = re.compile(r"[\d.]+ s\)|\"seconds\": [\d.]+")
    assert seconds.sub("", capsys.readouterr().out) == seconds.sub("", piped.out)


def test_a_check_that_fails_by_itself_is_no_error() -> None:
    def fails() -> Iterator[Finding]:
        yield ok("first")
        raise KeyError("MemTotal")

    first, second = checkup.run("memory", fails)
    assert first == ok("first", check="memory")
    assert second == warning("this check failed by itself: KeyError: 'MemTotal'", check="memory")
