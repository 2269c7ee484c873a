"""What the GPU benchmark says can be wrong: whose losses count, which ratio keeps a promise, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import carrying, sharing
from benchmarks.gpu.contestant import FIRST, Library, train
from benchmarks.gpu.rows import PROMISES, Promise, contestants, differs, ratio
from benchmarks.gpu.tasks import TASKS, weights
from benchmarks.gpu.turns import Contestant, take_turns

Run = Callable[..., subprocess.CompletedProcess[str]]
FASTER = Promise(task="gpt2", ours=("ddp", "ddp-graph"), theirs="torch", goal=2.0)


def test_our_fastest_counts_and_rounds_are_paired() -> None:
    rounds = {"ddp": [9.0, 9.0, 9.0], "ddp-graph": [1.0, 2.0, 3.0], "torch": [2.0, 4.0, 60.0]}
    assert ratio(FASTER, rounds) == 2.0
    assert FASTER.met(2.0)
    assert not FASTER.met(1.9)
    slower = Promise(task="gpt2", ours=("ddp",), theirs="torch", goal=1.03, slower=True)
    assert ratio(slower, rounds) == 2.25
    assert slower.met(1.03)
    assert not slower.met(1.04)


def test_who_did_not_run_keeps_no_promise() -> None:
    assert ratio(FASTER, {"torch": [1.0]}) is None
    assert ratio(FASTER, {"ddp": [1.0]}) is None


def test_losses_that_differ_are_found_out() -> None:
    assert differs([4.6, 4.5], [4.61, 4.52]) is None
    assert differs([0.001], [0.012]) is None
    assert differs([4.6, 4.2], [4.6, 4.5]) == "the loss of step 1 is 4.2000, and PyTorch's 4.5000"
    assert differs([float("nan")], [4.5]) is not None


def test_every_promise_is_about_a_task_and_compared_with_pytorch() -> None:
    assert {each.task for each in PROMISES} == set(TASKS)
    assert contestants("small-gpt") == ["torch", "ddp-graph", "torch-graphs"]
    assert all(contestants(task)[0] == "torch" for task in TASKS)


def test_tests_have_the_gpu_to_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They look at the time, and at how much memory is free."""
    happened: list[str] = []

    class Entered:
        def __init__(self, *_: str) -> None:
            happened.append("a contestant")

        def close(self) -> None:
            happened.append("closed")

    def tests(limit: float) -> dict[str, Any]:
        happened.append("tests")
        return {"summary": "", "failed": {}}

    monkeypatch.setattr(benchmark, "Contestant", Entered)
    monkeypatch.setattr(benchmark, "run_tests", tests)
    monkeypatch.setattr(benchmark, "facts", lambda device: {"gpu": "", "versions": {}})
    monkeypatch.setattr(benchmark, "compare", lambda *_: {"rounds": {}})
    monkeypatch.setattr(benchmark, "summary", lambda found: [])
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "gpt2", "--json", str(tmp_path / "gpu.json")])
    benchmark.main()
    assert happened[:2] == ["tests", "a contestant"]
    assert happened[-1] == "closed"


class Turning:
    """A contestant that gives so many answers."""

    def __init__(self, name: str, answers: int) -> None:
        self.name, self.left = name, answers

    def steps(self, count: int) -> float:
        if not self.left:
            raise RuntimeError(f"{self.name} gave no answer: out of memory")
        self.left -= 1
        return 0.125


def test_who_gives_no_answer_is_out_and_the_others_go_on() -> None:
    group: list[Any] = [Turning("torch", 100), Turning("ddp", 3), Turning("ddp-graph", 0)]
    times, out = take_turns(group, 4, time.monotonic() + 60)
    assert times == {"torch": [0.125] * 4}
    assert out == {name: f"{name} gave no answer: out of memory" for name in ("ddp", "ddp-graph")}


SUITE = """
import time, pytest
@pytest.mark.gpu
def test_works(): pass
@pytest.mark.gpu
def test_fails(): assert 1 + 1 == 3
@pytest.mark.gpu
@pytest.mark.skipif(True, reason="")
def test_skips(): pass
def test_of_no_gpu(): assert False
@pytest.mark.gpu
def test_takes_long(): time.sleep({seconds})
"""


@pytest.mark.parametrize(("seconds", "limit", "said"), [(0, 60, "2 passed, 1 failed, 1 skipped"), (60, 12, "")])
def test_tests_tell_what_failed_and_stop_in_time(
    seconds: int, limit: float, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: on a GPU\n")
    (tmp_path / "test_suite.py").write_text(SUITE.format(seconds=seconds))
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    found = benchmark.run_tests(limit)
    assert found["summary"].startswith(said), found
    assert found["summary"].endswith("not finished after 12 s") == bool(seconds), found
    assert "assert (1 + 1) == 3" in found["failed"]["test_suite::test_fails"]


def test_without_a_gpu_one_line_says_so(run_job: Run, tmp_path: Path) -> None:
    done = run_job([sys.executable, "-m", "benchmarks.gpu"], env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "benchmarks.gpu: there is no nvidia-smi, and so no GPU; --device cpu runs tiny sizes\n"


def test_gpt2_is_as_large_as_it_says() -> None:
    size = TASKS["gpt2"].size
    block = 12 * size.width**2 + 13 * size.width
    count = (size.vocabulary + size.length) * size.width + size.layers * block + 2 * size.width
    assert 124e6 < count < 125e6
    tiny = TASKS["gpt2"].small()
    model = tiny.model(ddp, tiny.size)
    found = weights(model)
    assert [*found] == [name for name, _ in model.named_parameters()]
    assert not found["blocks.0.qkv.bias"].any()
    assert found["norm.weight"].all()


def test_who_fails_says_why() -> None:
    contestant = Contestant("small-gpt", "ddp-graph", "cpu")
    try:
        trouble = contestant.ready(time.monotonic() + 60)
        assert trouble is not None
        assert "ready in time" not in trouble
    finally:
        contestant.close()


def test_the_loader_and_two_ranks_are_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "ROUNDS", 1)
    found = carrying.measure("cpu")
    assert 0 < found["ratio"] < 100
    assert "GB/s" in carrying.line(found)


@pytest.mark.mpi
def test_two_ranks_train_what_one_rank_trains() -> None:
    found = sharing.measure("cpu")
    assert found["ranks"] == 2
    assert found["equal"], found
    assert "equal to one rank" in sharing.line(found)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_run_on_a_cpu_compares_losses_and_writes_its_results(run_job: Run, tmp_path: Path) -> None:
    to = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--rounds", "1", "--only", "small-gpt"]
    done = run_job([*command, "--json", str(to)], timeout=100)
    assert done.returncode == 0, done.stderr
    assert "is out" not in done.stdout
    task = json.loads(to.read_text())["tasks"]["small-gpt"]
    assert [*task["seconds"]] == ["torch"]  # what is promised of the small one is promised of graphs
    assert np.isfinite(task["losses"]["torch"]).all()


@pytest.mark.parametrize("task", TASKS)
def test_contestants_train_alike_on_a_gpu_and_nothing_waits(task: str, gpu: Any) -> None:
    small = TASKS[task].small()
    losses = {}
    for name in ("ddp", "ddp-graph"):
        library = Library(name, "cuda")
        step = train(library, small)
        losses[name] = [float(step()) for _ in range(FIRST)]
        gpu.reset()
        for _ in range(2):
            step()
        assert not gpu.synchronizations
        assert (gpu.mallocs, gpu.frees) == (0, 0)
    assert losses["ddp"][-1] < losses["ddp"][0]
    assert differs(losses["ddp-graph"], losses["ddp"], 0.002) is None
