"""What the GPU benchmark says can be wrong: whose losses count, which ratio keeps a promise, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from benchmarks.gpu.__main__ import differs, take_turns
from benchmarks.gpu.tasks import TASKS
from benchmarks.gpu.worker import Library, first_losses, train
from benchmarks.worker_pool import WorkerError
from tests.conftest import Run


def test_losses_that_differ_are_found_out() -> None:
    theirs = [4.6, 4.5, 4.4, 4.3, 4.2]
    assert differs([4.61, 4.49, 4.41, 4.31, 4.19], theirs, theirs) is None
    assert differs([0.001], [0.004], [0.004]) is None
    assert differs([4.6, 4.2], [4.6, 4.5], [4.6, 4.5]) == (
        "the loss of step 1 is 4.2000, and PyTorch's 4.5000; 0.0225 may differ"
    )
    assert differs([float("nan")], [4.5], [4.5]) is not None


def test_later_losses_may_differ_as_two_runs_of_pytorch_do() -> None:
    theirs, again = [4.6, 4.5, 4.4, 4.3, 4.2], [4.6, 4.4, 4.4, 4.3, 4.2]
    assert differs([4.6, 4.5, 4.4, 4.05, 4.45], theirs, again) is None
    assert differs([4.6, 4.5, 4.4, 3.9, 4.2], theirs, again) is not None
    assert differs([4.6, 4.4, 4.4, 4.3, 4.2], theirs, again) is not None, "the first three are held to the rounding"


class Turning:
    """An implementation that gives so many answers."""

    def __init__(self, name: str, answers: int) -> None:
        self.library = name
        self.left = answers

    def answer(self, limit: float, do: str, count: int) -> float:
        if not self.left:
            raise WorkerError(f"{self.library}: out of memory")
        self.left -= 1
        return 0.125


def test_a_process_that_fails_is_out_and_the_others_go_on() -> None:
    group: list[Any] = [Turning("torch", 100), Turning("ddp", 3), Turning("ddp-graph", 0)]
    times, out = take_turns(group, 4, time.monotonic() + 60)
    assert times == {"torch": [0.125] * 4}
    assert out == {name: f"{name}: out of memory" for name in ("ddp", "ddp-graph")}


def test_without_a_gpu_one_line_says_so(run_job: Run, tmp_path: Path) -> None:
    done = run_job([sys.executable, "-m", "benchmarks.gpu"], env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "benchmarks.gpu: there is no nvidia-smi, and so no GPU; --device cpu runs tiny sizes\n"


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_run_on_a_cpu_compares_losses_and_writes_its_results(run_job: Run, tmp_path: Path) -> None:
    to = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--rounds", "1", "--only", "small-gpt"]
    done = run_job([*command, "--json", str(to)], timeout=100, code=0)
    assert "is out" not in done.stdout
    task = json.loads(to.read_text())["tasks"]["small-gpt"]
    assert [*task["seconds"]] == ["torch"]  # what is promised of the small one is promised of graphs
    assert np.isfinite(task["found"]["torch"]["losses"]).all()


@pytest.fixture
def _switches() -> Iterator[None]:
    """What a `Library` sets is as before."""
    before = ddp.get_float32_matmul_precision(), ddp.backends.cudnn.benchmark
    yield
    ddp.set_float32_matmul_precision(before[0])
    ddp.backends.cudnn.benchmark = before[1]


@pytest.mark.usefixtures("_switches")
def test_eager_steps_and_a_graph_train_alike_on_a_gpu_and_nothing_waits(gpu: Any) -> None:
    losses = {}
    for name in ("ddp", "ddp-graph"):
        library = Library(name, "cuda")
        library.forget()
        step = train(library, TASKS["small-gpt"].small())
        losses[name] = first_losses(step)
        gpu.reset()
        for _ in range(2):
            step()
        assert not gpu.synchronizations
        assert (gpu.mallocs, gpu.frees) == (0, 0)
        assert 0 < library.peaks()["allocated"] <= library.peaks()["reserved"]
    assert losses["ddp"][-1] < losses["ddp"][0]
    assert differs(losses["ddp-graph"], losses["ddp"], losses["ddp"]) is None
