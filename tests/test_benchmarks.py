"""Benchmarks: turns, goals, and one small run of each that starts ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddp
from benchmarks import calls, collectives, derivatives, harness, overlap, ports, report, torch_backend, zoo
from tests.conftest import Run

TORCH = importlib.util.find_spec("torch") is not None


def test_implementations_take_turns_and_their_order_alternates() -> None:
    turns: list[str] = []
    both = {name: lambda name=name: turns.append(name) or float(len(turns)) for name in "ab"}
    assert harness.take_turns(both, 2, warmup=1) == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert "".join(turns) == "abbaab"
    assert harness.over([1.0, 2.0, 3.0], [2.0, 8.0, 6.0]) == 0.5


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
        pytest.param(benchmark, key, marks=[] if key in ("gru", "mobilenet", "maml") else pytest.mark.long)
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


@pytest.mark.mpi
@pytest.mark.long
def test_pytorchs_calls_are_timed_on_both_backends(run_job: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "torch.json"
    command = [sys.executable, "-m", "benchmarks.torch_backend", "--rounds", "1", "--json", str(file)]
    done = run_job([*command, "--only", "barrier,ddp-mlp"], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert list(found["us"]) == ["barrier", "ddp-mlp"]
    assert [list(us) for us in found["us"].values()] == [["ddp", "gloo"], ["ddp", "gloo", "limit"]]
    assert [goal["what"] for goal in found["goals"]] == ["barrier: us", "ddp-mlp: ours / gloo"]


def test_on_two_hosts_the_best_bucket_sizes_are_compared() -> None:
    us = {"ddp, 1 MiB": [2.0, 4.0], "gloo, 1 MiB": [9.0, 9.0], "ddp, 25 MiB": [5.0, 5.0], "gloo, 25 MiB": [4.0, 8.0]}
    (goal,) = torch_backend.goals({"ddp-mlp": us})
    assert (goal.what, goal.measured) == ("ddp-mlp: ddp, 1 MiB / gloo, 25 MiB", 0.5)


@pytest.mark.mpi
def test_rows_of_ddp_bench_are_read() -> None:
    found = collectives.bench("all_reduce", 64, ["-n", "2", "--empty", "--iters", "2"])
    both = [f"{name}{place}" for name in ("ours", "comm.empty", "raw") for place in ("", ", out")]
    assert set(found) == {*both, *(["gloo"] if TORCH else [])}
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found.values())


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
        found: dict[str, Any] = json.loads(to.read_text())
        return found

    return run


@pytest.mark.mpi
@pytest.mark.long
def test_overlap_has_all_its_implementations(results: Callable[..., dict[str, Any]]) -> None:
    found = results("overlap", "--here", "--steps", "1", *([] if TORCH else ["--alone"]))["tasks"]["tiny"]
    assert list(found["ours"]) == ["bare", "default", "0.5 MiB", "off"]  # larger buckets would be the same
    assert list(found["theirs"]) == (["bare", *overlap.THEIRS] if TORCH else [])
    assert all(found["ours"][name]["limit"][0] > 0 for name in ("default", "0.5 MiB", "off"))
    assert found["buckets"]["off"] == [4 * (64 * 64 + 64 + 64 * 10 + 10)]


@pytest.mark.mpi
@pytest.mark.long
def test_overlap_sends_its_gradients_over_the_wire(results: Callable[..., dict[str, Any]]) -> None:
    found = results("overlap", "--steps", "1")["tasks"]["tiny"]
    nbytes = sum(found["buckets"]["default"])
    assert all(nbytes < found["ours"][name]["sent"][0] < 1.5 * nbytes for name in ("default", "off"))


@pytest.mark.mpi
@pytest.mark.long
def test_compression_trains_with_each_hook(results: Callable[..., dict[str, Any]]) -> None:
    found = results("compression", "--here", "--hooks", "bf16", "--steps", "1")
    assert list(found["tasks"]["tiny"]["hooks"]) == ["none", "bf16"]


@pytest.mark.mpi
@pytest.mark.long
def test_micro_batches_are_timed_beside_accumulation(results: Callable[..., dict[str, Any]]) -> None:
    found = results("micro_batches", "--here", "--steps", "1")["tasks"]["tiny"]
    assert [sorted(found[count]) for count in "248"] == 3 * [["accumulated", "tree"]]


def test_what_a_rank_raises_ends_the_benchmark(run_job: Run) -> None:
    train = "with RankPool('ddp', 1) as ours: ours.ask('train', name='nobody', steps=1)"
    code = f"from benchmarks.worker_pool import RankPool\n{train}"
    done = run_job([sys.executable, "-c", code])
    assert done.returncode == 1
    assert "a rank of ddp: " in done.stderr
    assert "KeyError: 'nobody'" in done.stderr


def test_what_an_op_costs_the_host_is_timed_for_both(tmp_path: Path) -> None:
    calls.main(["--device", "cpu", "--only", "ops", "--rounds", "1", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["medians"]) == 7
    assert all(times["ours"] > 0 for times in found["medians"].values())


SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
data = TensorDataset(torch.randn(9, 4), torch.randint(0, 3, (9,)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, t in DataLoader(data, batch_size=2, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), t).backward()
    optimizer.step()
print(float(sum(p.sum() for p in net.parameters()).item()), torch.zeros(1).float().dtype)
"""


def test_a_script_computes_the_same_with_its_imports_swapped(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is the oracle here")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "main.py").write_text(SCRIPT)
    theirs, ours = (ports.run(ports.Port("mine", "mine", ["main.py"]), tmp_path, each) for each in ports.LIBRARIES)
    assert (theirs.error, ours.error) == ("", "")
    assert [len(noted) for noted in ours.noted] == [6]
    assert ports.difference(ours.noted, theirs.noted) < 1e-14


def test_scripts_that_differ() -> None:
    assert ports.difference([[1.0, 300.0]], [[1.5, 200.0]]) == 0.5
    assert ports.difference([[1.0]], [[1.0, 2.0]]) == float("inf")
    assert ports.difference([[1.0, 2.0]], [[1.0], [2.0]]) == float("inf")
    assert ports.difference([[float("nan")]], [[1.0]]) == float("inf")
