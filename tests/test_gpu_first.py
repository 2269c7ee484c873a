"""The program of the first minutes on a GPU: verdicts, files and ends with steps of every bad kind; its own steps."""

from __future__ import annotations

import json
import re
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddp
from benchmarks.gpu import first, first_steps
from benchmarks.harness import ROOT
from tests.conftest import Job, Run
from tests.test_gpu_benchmark import _switches  # noqa: F401  # a fixture

STEPS = {
    # It does not listen to SIGINT, and leaves a child in a session of its own.
    "hangs": (
        "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('it begins');"
        "subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"
    ),
    "crashes": "import os, signal; print('it crashes'); os.kill(os.getpid(), signal.SIGSEGV)",
    "garbage": r"import os; os.write(1, b'\xff\x00\x1b[31m\t' * 9999); os._exit(3)",
    "passes": "print('warning: no wheel: pip install it'); print('well')",
    "waits": "import os, time; open(os.environ['BEGUN'], 'w'); time.sleep(60)",
}
PROGRAM = """
import sys
from benchmarks.gpu import first
first.GRACE = 0.3
first.main(lambda device, logs: [
    first.Step(name, limit, [sys.executable, "-c", code]) for name, limit, code in {steps}
])
"""
Start = Callable[..., Job]


@pytest.fixture
def start(start_job: Start, tmp_path: Path) -> Start:
    """Starts the program with some of these steps, "hangs" for 1 s at most. It writes its files to tmp_path."""

    def start(*names: str, limit: str = "60", **environ: str) -> Job:
        steps = [(name, 1 if name == "hangs" else 20, STEPS[name]) for name in names]
        code = PROGRAM.format(steps=steps)
        return start_job([sys.executable, "-c", code, "--out", tmp_path, "--limit", limit], env=environ)

    return start


def verdicts(out: Path) -> dict[str, str]:
    return {step["step"]: step["verdict"] for step in json.loads((out / "first.json").read_text())["steps"]}


def log(out: Path, name: str) -> bytes:
    with tarfile.open(out / "logs.tgz") as tar:
        file = tar.extractfile(f"logs/{name}.txt")
        assert file is not None
        return file.read()


def test_whatever_a_step_does_the_next_one_runs(start: Start, tmp_path: Path) -> None:
    done = start("hangs", "crashes", "garbage", "passes").wait()
    assert (done.returncode, done.stderr) == (1, "")
    assert verdicts(tmp_path) == {
        "hangs": "failed: not finished after 1 s",
        "crashes": "failed: Segmentation fault",
        "garbage": "failed: exit status 3",
        "passes": "passed; warning: no wheel: pip install it",
    }
    assert log(tmp_path, "passes") == b"warning: no wheel: pip install it\nwell\n"
    assert len(log(tmp_path, "garbage")) == 8 * 9999
    rows, _, summary = done.stdout.partition("\n\n")
    assert [row.split()[0] for row in rows.splitlines()] == list(verdicts(tmp_path))
    assert summary.startswith("== hangs: failed: not finished after 1 s\nit begins\n\n== crashes: failed: Seg")
    assert summary.endswith("\n\n1 of 4 steps passed\n")
    assert done.stdout.replace("\n", "").isprintable()


def test_ctrl_c_ends_the_step_and_writes_what_there_is(start: Start, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    job = start("passes", "waits", "crashes", BEGUN=str(begun))
    while not begun.exists():
        time.sleep(0.02)
    job.process.send_signal(signal.SIGINT)
    done = job.wait(20)
    assert (done.returncode, done.stderr) == (1, "")
    assert verdicts(tmp_path) == {"passes": "passed; warning: no wheel: pip install it", "waits": "interrupted"}
    assert done.stdout.endswith("\n1 of 2 steps passed\n")
    assert b"KeyboardInterrupt" in log(tmp_path, "waits")


def test_without_a_gpu_one_sentence_says_so_and_no_other_step_runs(run_job: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.first", "--out", str(tmp_path)]
    done = run_job(command, env={"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("benchmarks.gpu.first: .*GPU.*\n", done.stderr)
    assert list(verdicts(tmp_path)) == ["versions"]


def test_the_tests_of_the_table_are_all_that_need_a_gpu() -> None:
    marked = re.compile(r"^(@|pytestmark = \[?)pytest\.mark\.gpu\b", re.M)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    assert len(files) > 5
    words = [word for step in first.table("cuda", Path()) for word in step.command if word.startswith("tests/")]
    paths = [ROOT / word for word in words]
    assert not [path for path in paths if not path.exists()]
    assert not [file for file in files if not any(file.is_relative_to(path) for path in paths)]


# --- the steps of its own ------------------------------------------------------------------------------------------


def test_the_steps_of_a_cpu_run_on_one(run_job: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.first", "--device", "cpu", "--out", str(tmp_path)]
    done = run_job([*command, "--only", "kernels,derivatives,tiny-small-gpt,full-small-gpt"], code=0, err="")
    assert "5 of 5 steps passed" in done.stdout
    assert "ms a step" in done.stdout


def test_ops_on_the_stand_in_and_those_that_differ_are_named(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first_steps.derivatives("cuda")
    capsys.readouterr()
    first_steps.kernels("cuda")
    monkeypatch.setattr(first_steps, "TOLERANCES", {ddp.float32: -1.0})
    with pytest.raises(SystemExit, match="1"):
        first_steps.kernels("cuda")
    assert re.match("0 differ\n13 differ\nlayer_norm, float32: AssertionError: .* off\n", capsys.readouterr().out)
