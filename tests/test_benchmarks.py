"""Benchmarks: turns, the table of the README, equal steps in both libraries, and small runs of those with ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddp
from benchmarks import derivatives, harness, ports, report, zoo
from tests.conftest import Run


def test_implementations_take_turns_and_their_order_alternates() -> None:
    turns: list[str] = []
    both = {name: lambda name=name: turns.append(name) or float(len(turns)) for name in "ab"}
    assert harness.take_turns(both, 2, warmup=1) == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert "".join(turns) == "abbaab"


def test_the_table_of_the_readme_is_made_of_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "--check"])
    report.main()
    old = tmp_path / "README.md"
    old.write_text(report.README.read_text().replace("**", "**1", 1))
    monkeypatch.setattr(report, "README", old)
    with pytest.raises(SystemExit, match="other results"):
        report.main()
    assert report.duration(0.0273) == "27.3 ms"


@pytest.mark.parametrize(
    ("benchmark", "key"),
    [
        pytest.param(benchmark, key, marks=[] if key in ("gru", "maml") else pytest.mark.long)
        for benchmark in (zoo, derivatives)
        for key in benchmark.STEPS
    ],
)
def test_steps_lose_the_same_in_both_libraries(benchmark: Any, key: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

    losses = {}
    for library in (ddp, torch):
        step = benchmark.STEPS[key][2](library)
        losses[library.__name__] = [step(), step()]
    assert zoo.disagreement(losses) <= (zoo.LOSSES_AGREE if benchmark is zoo else 1e-5)
    assert zoo.disagreement({"ddp": [2.0, 1.1], "torch": [2.0, 1.0]}) == pytest.approx(0.1)


@pytest.fixture
def results(run_job: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`results("overlap", "--here")` runs a benchmark of one tiny net, and returns what it writes."""

    def run(name: str, *options: str) -> dict[str, Any]:
        to = tmp_path / "results.json"
        options = (*options, "--only", "tiny", "--rounds", "1", "--json", str(to))
        done = run_job([sys.executable, "-m", f"benchmarks.{name}", *options], timeout=100)
        if "namespaces" in done.stderr or "two hosts on one machine need" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(to.read_text())
        return document

    return run


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "measured"),
    [
        ("overlap", ("--here",), "theirs"),
        ("overlap", (), "ours"),  # over a wire between two namespaces
        ("compression", ("--here", "--hooks", "bf16"), "hooks"),
        ("micro_batches", ("--here",), "8"),
    ],
)
def test_a_benchmark_of_ranks_runs(
    name: str, options: tuple[str, ...], measured: str, results: Callable[..., dict[str, Any]]
) -> None:
    pytest.importorskip("torch")
    assert results(name, *options, "--steps", "1")["tasks"]["tiny"][measured]


def test_scripts_that_differ() -> None:
    assert ports.difference([[1.0, 300.0]], [[1.5, 200.0]]) == 0.5
    assert ports.difference([[1.0]], [[1.0, 2.0]]) == float("inf")
    assert ports.difference([[1.0, 2.0]], [[1.0], [2.0]]) == float("inf")
    assert ports.difference([[float("nan")]], [[1.0]]) == float("inf")
