"""ddp-bench from its command line to its tables, files and exit codes, on ranks of its own and on those of others."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launcher.bench import __main__ as command
from launcher.bench import report, runner
from launcher.bench.collective_table import COLLECTIVES
from launcher.bench.implementations import Ours, OursOnDevice
from launcher.bench.report import Outcome
from launcher.bench.settings import OPS, parse
from launcher.errors import UsageError

BENCH = [sys.executable, "-m", "launcher.bench"]
QUICK = ["-b", "64", "-e", "512", "-f", "8", "--iters", "2", "--warmup", "1", "--check"]


def threads(*args: str, ranks: int = 2) -> Outcome:
    """What is measured between threads of this process."""
    return runner.join(parse([*args, *QUICK, "-n", str(ranks), "--backend", "threads"]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_collectives_give_correct_results(ranks: int, capsys: Any) -> None:
    outcome = threads("all", "-d", "float32,int8", ranks=ranks)
    printed = capsys.readouterr().out
    assert (outcome.backend, outcome.ranks, outcome.nodes) == ("threads", ranks, 1)
    assert [line.split(":")[0] for line in printed.splitlines() if "backend thr" in line or "needs at" in line] == [
        f"# {name}" for name in COLLECTIVES
    ]
    measured = {name: collective for name, collective in COLLECTIVES.items() if ranks >= collective.least_ranks}
    for name, collective in measured.items():
        rows = [row for row in outcome.rows if row.collective == name]
        dtypes = ["none"] if collective.empty else ["float32"] * 2 + ["int8"] * 2
        assert [(row.dtype, row.place) for row in rows] == [
            (dtype, place) for dtype in dtypes for place in collective.places
        ]
        assert {row.wrong for row in rows} == {None if collective.empty else 0}
        assert all(row.seconds > 0 and len(row.rounds) == row.calls == 2 for row in rows)
    assert "# wrong elements: 0" in printed


_MEANINGLESS = {("bool", "sum"), ("bool", "mean"), ("bool", "prod"), ("complex64", "max"), ("complex64", "min")}


@pytest.mark.parametrize("op", OPS)
def test_every_op_of_every_kind_of_number(op: str) -> None:
    dtypes = [each for each in ("bfloat16", "uint16", "complex64", "bool") if (each, op) not in _MEANINGLESS]
    outcome = threads("all_reduce", "reduce", "reduce_scatter", "-d", ",".join(dtypes), "-o", op)
    assert (outcome.wrong, len(outcome.rows)) == (0, 12 * len(dtypes))


@pytest.mark.parametrize("name", ["all_reduce", "scatter"])
def test_one_wrong_element_is_found(name: str, monkeypatch: Any, capsys: Any) -> None:
    bind = Ours.bind

    def lying(self: Ours, collective: Any, x: Any, out: Any, op: str) -> Any:
        call = bind(self, collective, x, out, op)
        result = x if out is None else out

        def wrapped() -> None:
            call()
            if self.comm.rank == 0:
                result[-1] += 1

        return wrapped

    monkeypatch.setattr(Ours, "bind", lying)
    assert command.main([name, *QUICK, "--backend", "threads"]) == 1
    number = 2 * len(COLLECTIVES[name].places)
    assert capsys.readouterr().err == f"ddp-bench: {number} elements were wrong\n"
    monkeypatch.setattr(Ours, "bind", lambda self, *args: lambda: None)  # writes nothing at all
    assert [row.wrong for row in threads("all_gather", "--place", "out").rows] == [2 * 16, 2 * 128]


def test_arrays_of_a_gpu_are_waited_for(monkeypatch: Any) -> None:
    done: list[str] = []
    note: Any = done.append
    stream = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    cupy = SimpleNamespace(
        zeros=np.zeros,
        asarray=lambda values: note("to the device") or np.asarray(values),
        asnumpy=lambda buffer: note("to the host") or buffer.copy(),
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    ours = OursOnDevice(SimpleNamespace(backend="nccl"))  # type: ignore[arg-type]  # no more is looked at
    buffer = ours.empty(8).view(np.float32)
    ours.write(buffer, np.full(1, 7, np.float32))
    assert [*ours.read(buffer)] == [7, 7]
    ours.settle()
    assert done == ["to the device", "to the host", "synchronize"]
    assert ours.name == "ours nccl"


@pytest.mark.parametrize(
    ("args", "missing", "says"),
    [
        (["--vs", "torch-gloo"], "torch", "baseline torch-gloo needs torch, which is not installed: pip install torch"),
        (["--plot", "a.png"], "matplotlib", "--plot needs matplotlib, which is not installed: pip install matplotlib"),
        pytest.param(
            ["--plot", "a.xyz"],
            "",
            "--plot a.xyz should end as matplotlib's files do: .",
            marks=pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib"),
        ),
        (["--json", "."], "", ". cannot be written"),
        (["--json", "no/where.json"], "", "no/where.json cannot be written"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_starts(
    args: list[str], missing: str, says: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    assert command.main(["all_reduce", *args]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"ddp-bench: {says}")


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_use_under_a_launcher_is_reported_once(rank: int, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", "2")
    for args, says in (
        (["-n", "3"], "-n 3 was requested, but mpich has started 2 ranks"),
        (["--backend", "threads"], "backend threads starts its own ranks: start ddp-bench by itself"),
    ):
        assert command.main(["all_reduce", *args]) == 2
        assert (says in capsys.readouterr().err) == (rank == 0)


def test_a_picture_has_a_line_for_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    report.save_plot(str(path), threads("all_reduce", "broadcast", "barrier"))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot be written"):
        report.save_plot(str(tmp_path / "bench.doc"), threads("barrier"))


# Ranks that are processes --------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_on_ranks_of_its_own_beside_all_baselines(run_job: Any, tmp_path: Path) -> None:
    baselines = ["mpi4py", "torch-gloo"] if importlib.util.find_spec("torch") else ["mpi4py"]
    once = ["-b", "64", "-e", "64", "--iters", "1", "--warmup", "1", "--check", "-d", "float32,bfloat16"]
    path = tmp_path / "bench.json"
    words = ["all", "-n", "2", *once, "--empty", "--vs", ",".join(baselines), "--json", path]
    done = run_job([*BENCH, *words], code=0, err="")
    assert [line for line in done.stdout.splitlines() if "backend mpi" in line] == [
        f"# {name}: 2 ranks on 1 node, backend mpi" for name in COLLECTIVES
    ]
    document = json.loads(path.read_text())
    assert document["settings"]["collectives"] == list(COLLECTIVES)
    assert document["machine"]["cores"] == os.cpu_count()
    assert {"python", "numpy", "mpi4py", "ddp-runtime"} <= set(document["versions"])
    assert not any(row["wrong"] for row in document["rows"])
    assert all((row["ratio"] is None) == (row["by"] == "ours mpi") for row in document["rows"])
    by_whom = ["ours mpi", "ours mpi empty", *baselines]
    refused = {("reduce_scatter", "mpi4py", "in"), ("all_reduce", "torch-gloo", "out"), ("reduce", "torch-gloo", "out")}
    measured = {(row["collective"], row["by"], row["place"]) for row in document["rows"] if row["dtype"] != "bfloat16"}
    expected = {
        (name, by, place) for name in COLLECTIVES for by in by_whom for place in COLLECTIVES[name].places
    } - refused
    assert measured == expected
    if "torch-gloo" in baselines:
        reason = "torch-gloo has no all_reduce of float32, place out: torch.distributed reduces in place"
        assert reason in document["unsupported"]
        assert "bfloat16" in {row["dtype"] for row in document["rows"] if row["by"] == "torch-gloo"}


@pytest.mark.mpi
def test_on_the_ranks_of_mpiexec(run_job: Any, mpiexec: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run_job([*mpiexec, "-n", "2", *BENCH, "all_reduce", *QUICK, "--json", path], code=0)
    assert done.stdout.count("# all_reduce: 2 ranks on 1 node, backend mpi") == 1
    assert json.loads(path.read_text())["ranks"] == 2
