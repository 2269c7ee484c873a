"""ddp-bench from its command line to its tables, files and exit codes, on ranks of its own and on those of others."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launcher.bench import __main__ as command
from launcher.bench import report, worker
from launcher.bench.collective_table import KINDS
from launcher.bench.implementations import Ours, OursOnDevice, OursShared
from launcher.bench.report import Outcome
from launcher.bench.settings import OPS, parse
from launcher.errors import UsageError

BENCH = [sys.executable, "-m", "launcher.bench"]
QUICK = ["-b", "64", "-e", "512", "-f", "8", "--iters", "2", "--warmup", "1", "--check"]


def threads(*args: str, ranks: int = 2) -> Outcome:
    """What is measured between threads of this process."""
    settings = parse([*args, *QUICK, "-n", str(ranks), "--backend", "threads"])
    return worker.join(settings, "threads", ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_collectives_bring_what_they_must(ranks: int, capsys: Any) -> None:
    outcome = threads("all", "-d", "float32,int8", ranks=ranks)
    said = capsys.readouterr().out
    assert (outcome.backend, outcome.ranks, outcome.nodes) == ("threads", ranks, 1)
    assert [line.split(":")[0] for line in said.splitlines() if "backend threads" in line or "needs at" in line] == [
        f"# {name}" for name in KINDS
    ]
    measured = {name: kind for name, kind in KINDS.items() if ranks >= kind.least_ranks}
    for name, kind in measured.items():
        rows = [row for row in outcome.rows if row.collective == name]
        assert [row.dtype for row in rows] == (["none"] if kind.empty else ["float32"] * 2 + ["int8"] * 2)
        for row in rows:
            assert tuple(row.cells) == kind.places
            assert [cell.wrong for cell in row.cells.values()] == [None if kind.empty else 0] * len(kind.places)
            assert all(cell.seconds > 0 and len(cell.rounds) == cell.calls == 2 for cell in row.cells.values())
    assert len(outcome.rows) == 4 * len(measured) - 3
    assert "# wrong elements: 0" in said


_MEANINGLESS = {("bool", "sum"), ("bool", "mean"), ("bool", "prod"), ("complex64", "max"), ("complex64", "min")}


@pytest.mark.parametrize(
    ("dtype", "op"),
    sorted(set(product(["bfloat16", "uint16", "complex64", "bool"], OPS)) - _MEANINGLESS),
)
def test_every_op_of_every_kind_of_number(dtype: str, op: str) -> None:
    outcome = threads("all_reduce", "reduce", "reduce_scatter", "-d", dtype, "-o", op)
    assert outcome.wrong == 0
    assert len(outcome.rows) == 6


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "scatter"])
def test_one_wrong_element_is_found(name: str, monkeypatch: Any, capsys: Any) -> None:
    bind = Ours.bind

    def lying(self: Ours, kind: Any, x: Any, out: Any, op: str) -> Any:
        call = bind(self, kind, x, out, op)
        got = x if out is None else out

        def wrapped() -> None:
            call()
            if self.comm.rank == 0:
                got[-1] += 1

        return wrapped

    monkeypatch.setattr(Ours, "bind", lying)
    outcome = threads(name)
    assert {cell.wrong for row in outcome.rows for cell in row.cells.values()} == {1}
    assert f"# wrong elements: {outcome.wrong}" in capsys.readouterr().out
    assert command._finish(parse([name]), [outcome]) == 1
    assert capsys.readouterr().err == f"ddp-bench: {outcome.wrong} elements were wrong\n"


def test_a_result_that_never_came_is_wrong(monkeypatch: Any) -> None:
    monkeypatch.setattr(Ours, "bind", lambda self, *args: lambda: None)
    outcome = threads("all_gather", "--place", "out")
    assert [row.cells["out"].wrong for row in outcome.rows] == [2 * 16, 2 * 128]


def test_what_an_implementation_lacks_is_named_and_left_out(monkeypatch: Any, capsys: Any) -> None:
    bind = Ours.bind

    class Baseline(Ours):
        unsupported = (NotImplementedError,)

        def bind(self, kind: Any, x: Any, out: Any, op: str) -> Any:
            if out is x:
                raise NotImplementedError("not in place\nand more")
            return bind(self, kind, x, out, op)

    def both(comm: Any, settings: Any) -> Any:
        baseline = Baseline(comm)
        baseline.name = "baseline"
        return sync(comm, settings)[0], [Ours(comm), baseline]

    sync = worker._implementations
    monkeypatch.setattr(worker, "_implementations", both)
    outcome = threads("all_reduce")
    assert {tuple(row.cells) for row in outcome.rows if row.by == "baseline"} == {("out",)}
    assert {tuple(row.cells) for row in outcome.rows if row.by == "ours threads"} == {("out", "in")}
    assert all(row.cells["out"].ratio is not None for row in outcome.rows if row.by == "baseline")
    assert outcome.unsupported == ("baseline has no all_reduce of float32 in-place: not in place",)
    assert f"# {outcome.unsupported[0]}" in capsys.readouterr().out.splitlines()


def test_shared_arrays_need_a_communicator_that_has_them() -> None:
    with pytest.raises(UsageError, match=r"--empty: the communicator of backend x has no empty\(\)"):
        OursShared(SimpleNamespace(backend="x"))  # type: ignore[arg-type]  # no more is looked at
    asked = []
    comm = SimpleNamespace(backend="x", empty=lambda shape, dtype: asked.append(shape) or np.ones(shape, dtype))
    buffer = OursShared(comm).empty(12)  # type: ignore[arg-type]
    assert asked == [(12,)]
    assert not buffer.any()


def test_arrays_of_a_gpu_are_waited_for(monkeypatch: Any) -> None:
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    cupy = SimpleNamespace(
        zeros=np.zeros,
        asarray=lambda values: done.append("to the device") or np.asarray(values),
        asnumpy=lambda buffer: done.append("to the host") or buffer.copy(),
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


# Before a rank has started ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "missing", "says"),
    [
        (["--vs", "torch-gloo"], "torch", "baseline torch-gloo needs torch, which is not installed: pip install"),
        (["--vs", "mpi4py"], "mpi4py", "baseline mpi4py needs mpi4py, which is not installed"),
        (["--plot", "a.png"], "matplotlib", "--plot needs matplotlib, which is not installed"),
        (["--plot", "a.pdf"], "", "the plot is a PNG, so its name should end in .png: a.pdf"),
        (["--json", "."], "", ". is a directory, not a file to be written"),
        (["--json", "no/where.json"], "", "there is no folder no for where.json"),
        (["--json", "locked.json"], "", "locked.json cannot be written"),
        (["-e", "1G"], "", "sizes up to 1073741824 bytes need 4.3 GB in all, 1.0 GB are available"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    args: list[str], missing: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("locked.json").touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "locked.json" and access(path, mode))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(command, "available_memory", lambda: 10**9)
    assert command.main(["all_reduce", *args]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("ddp-bench: ")
    assert says in said.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-n", "3"], "-n 3 was asked for, but mpich has started 2 ranks"),
        (["--backend", "threads"], "backend threads makes ranks of its own: start ddp-bench by itself"),
        (["--backend", "mpi,threads"], "under a launcher a job has one backend"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_use_under_a_launcher_is_told_once(
    args: list[str], says: str, rank: int, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", "2")
    assert command.main(["all_reduce", *args]) == 2
    assert (says in capsys.readouterr().err) == (rank == 0)


def test_help_and_version(capsys: Any) -> None:
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert all(name in text for name in KINDS)
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ddp-bench ")


# Pictures ----------------------------------------------------------------------------------------------------------


def test_a_picture_has_a_line_for_each(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    assert not report.save_plot(str(tmp_path / "bench.png"), [threads("barrier")], "title")
    outcome = threads("all_reduce", "broadcast", "barrier")
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: figures.append(self) or savefig(self, *args, **more)
    )
    path = tmp_path / "bench.png"
    assert report.save_plot(str(path), [outcome], "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    panels = {panel.get_title(): panel for panel in figure.axes if panel.get_visible()}
    assert list(panels) == ["all_reduce", "broadcast"]
    lines = {line.get_label(): line for line in panels["all_reduce"].get_lines()}
    assert list(lines) == ["ours threads, out of place", "ours threads, in place"]
    rows = [row for row in outcome.rows if row.collective == "all_reduce"]
    assert [*lines["ours threads, in place"].get_xdata()] == [64, 512]
    assert [*lines["ours threads, in place"].get_ydata()] == [row.cells["in"].busbw for row in rows]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)


# Ranks that are processes --------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_on_ranks_of_its_own(run_job: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run_job([*BENCH, "all", "-n", "2", *QUICK, "--empty", "--vs", "mpi4py", "--json", path])
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if "backend mpi" in line] == [
        f"# {name}: 2 ranks on 1 node, backend mpi" for name in KINDS
    ]
    document = json.loads(path.read_text())
    assert document["settings"]["collectives"] == list(KINDS)
    assert document["machine"]["cores"] == os.cpu_count()
    (job,) = document["jobs"]
    assert {"python", "numpy", "mpi4py", "ddp-runtime"} <= set(job["versions"])
    by_whom = ("ours mpi", "ours mpi empty", "mpi4py")
    measured = {(row["collective"], row["by"], place) for row in job["rows"] for place in row["cells"]}
    assert not any(cell["wrong"] for row in job["rows"] for cell in row["cells"].values())
    refused = {("reduce_scatter", "mpi4py", "in")}
    everything = {(name, by, place) for name, kind in KINDS.items() for by in by_whom for place in kind.places}
    assert measured == everything - refused
    fitted = {(each["collective"], each["by"], each["place"]) for each in job["fits"]}
    assert fitted == {each for each in measured if each[0] != "barrier"}


@pytest.mark.mpi
def test_beside_gloo(run_job: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "bench.json"
    collectives = ["all_reduce", "broadcast", "gather", "scatter", "all_gather", "all_to_all", "send_recv", "barrier"]
    once = ["-b", "64", "-e", "64", "--iters", "1", "--warmup", "1", "--check"]
    done = run_job([*BENCH, *collectives, *once, "-d", "float32,bfloat16", "--vs", "torch-gloo", "--json", path])
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(path.read_text())["jobs"]
    gloo = [row for row in job["rows"] if row["by"] == "torch-gloo"]
    assert not any(cell["wrong"] for row in gloo for cell in row["cells"].values())
    assert {row["collective"] for row in gloo if row["dtype"] != "bfloat16"} == set(collectives)
    reason = "torch-gloo has no all_reduce of float32 out-of-place: torch.distributed reduces in place"
    assert reason in job["unsupported"]
    assert all(cell["ratio"] is not None for row in gloo for cell in row["cells"].values())


@pytest.mark.mpi
def test_on_the_ranks_of_mpiexec(run_job: Any, mpiexec: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run_job([*mpiexec, "-n", "2", *BENCH, "all_reduce", *QUICK, "--json", path])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# all_reduce: 2 ranks on 1 node, backend mpi") == 1
    assert len([line for line in done.stdout.splitlines() if not line.startswith("#") and line]) == 2
    assert json.loads(path.read_text())["jobs"][0]["ranks"] == 2


@pytest.mark.mpi
def test_backends_in_turn(run_job: Any) -> None:
    done = run_job([*BENCH, "barrier", *QUICK, "--backend", "mpi,threads,single"])
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if "# barrier" in line] == [
        "# barrier: 2 ranks on 1 node, backend mpi",
        "# barrier: 2 ranks on 1 node, backend threads",
        "# barrier: 1 rank on 1 node, backend single",
    ]


@pytest.mark.mpi
def test_ctrl_c(start_job: Any) -> None:
    job = start_job([*BENCH, "all_reduce", "--budget", "60", "-b", "1M", "-e", "1M"])
    line = job.process.stdout.readline()
    assert line.startswith("# all_reduce")
    time.sleep(0.3)
    start = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)
    done = job.wait(20)
    assert done.returncode == 130
    assert done.stderr == "ddp-launch: Ctrl-C: ending the job (once more kills it at once)\n"
    assert time.monotonic() - start < 10


def test_a_named_pipe_without_a_reader_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be written: No such device or address"):
        report.save(str(tmp_path / "pipe"), {})
