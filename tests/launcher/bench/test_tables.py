"""The pure parts of ddp-bench, as tables: what goes in, what comes out."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from launcher.bench import collective_table, expected, report, worker
from launcher.bench.collective_table import KINDS
from launcher.bench.report import Outcome
from launcher.bench.settings import DTYPES, Settings, parse, parse_size
from launcher.errors import UsageError


def test_sizes_are_written_in_powers_of_1024() -> None:
    assert [*map(parse_size, ("8", "0", "4K", "128M", "128m", "1G"))] == [8, 0, 4096, 128 << 20, 128 << 20, 1 << 30]
    for text in ("", "M", "1.5M", "-8", "8 K", "1T", "1KiB", "٣"):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            parse_size(text)
    assert [*map(report.size_text, (8, 65536, 3 << 19, 1 << 30))] == ["8", "64K", "1.5M", "1G"]


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ("-b 8 -e 128 -f 4", [8, 32, 128]),
        ("-b 8 -e 127 -f 4", [8, 32]),
        ("-b 8 -e 64", [8, 16, 32, 64]),
        ("-b 1K -e 3K -i 1K", [1024, 2048, 3072]),
        ("-b 8 -e 8", [8]),
        ("-b 64M", [64 << 20]),
    ],
)
def test_sizes(args: str, sizes: list[int]) -> None:
    assert parse(["all_reduce", *args.split()]).sizes() == sizes


def test_a_command_line() -> None:
    line = "reduce all_gather,reduce -n 4 -b 8 --maxbytes=1M -f4 -d float32,bfloat16 --vs mpi4py --check --iters 7"
    assert parse(line.split()) == Settings(
        collectives=("reduce", "all_gather"),
        ranks=4,
        minbytes=8,
        maxbytes=1 << 20,
        stepfactor=4,
        dtype=("float32", "bfloat16"),
        vs=("mpi4py",),
        check=True,
        iters=7,
    )
    assert parse(["all"]).collectives == tuple(KINDS)


def test_settings_survive_a_command_line() -> None:
    settings = parse(["all", "--empty", "--backend", "mpi,threads", "--plot", "é.png", "--vs", "mpi4py"])
    assert Settings.decode(settings.encode()) == settings


def test_a_config_file(tmp_path: Any) -> None:
    path = tmp_path / "bench.toml"
    path.write_text('collective = ["reduce", "barrier"]\nranks = 3\nmaxbytes = "1M"\nvs = ["mpi4py"]\ncheck = false\n')
    settings = parse(["--config", str(path), "-n", "2"])
    assert settings == Settings(collectives=("reduce", "barrier"), ranks=2, maxbytes=1 << 20, vs=("mpi4py",))
    assert parse(["all_gather", "--config", str(path)]).collectives == ("all_gather",)


@pytest.mark.parametrize("name", ["bench.toml", "bench_small.toml"])
def test_our_config_files(name: str, request: Any) -> None:
    assert parse(["--config", str(request.config.rootpath / "configs" / name)]).check


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "no collective to measure: ddp-bench all, or one of all_reduce, reduce"),
        ("all_reduc", "unknown collective all_reduc (did you mean all_reduce?)"),
        ("all_reduce -b x", "-b/--minbytes should be a number of bytes, as 512, 64K, 128M or 1G, not 'x'"),
        ("all_reduce -b 8 -e 4", "maxbytes (4) is smaller than minbytes (8)"),
        ("all_reduce -b 0", "minbytes should be at least 1, not 0"),
        ("all_reduce -f 1", "stepfactor should be at least 2, not 1"),
        ("all_reduce -i 0", "stepbytes should be at least 1, not 0"),
        ("all_reduce -f 2 -i 8", "by a factor (-f) or by an increment (-i), not by both"),
        ("all_reduce -n 0", "ranks should be at least 1, not 0"),
        ("all_reduce -n two", "-n/--ranks should be a whole number, not 'two'"),
        ("all_reduce --iters 0", "iters should be at least 1, not 0"),
        ("all_reduce --budget nan", "budget should be a number of seconds above 0, not nan"),
        ("all_reduce -n", "-n/--ranks expected one argument"),
        ("all_reduce --chekc", "unknown option --chekc (did you mean --check?)"),
        ("all_reduce --check=1", "--check ignored explicit argument '1'"),
        ("all_reduce --backend mpii", "unknown backend mpii (did you mean mpi?)"),
        ("all_reduce -d float23", "unknown dtype float23 (did you mean float32?)"),
        ("all_reduce --vs nccl", "unknown baseline nccl: one of mpi4py, torch-gloo"),
        ("all_reduce -o avg", "unknown op avg"),
        ("all_reduce --place up", "unknown place up"),
        ("all_reduce -d bool", "bool has max and min only, not sum"),
        ("all_reduce -d complex64 -o max", "complex64 has no max"),
        ("all_reduce -n 2 --backend single", "backend single is a world of one: -n 1, not 2"),
        ("all_reduce --backend threads --vs mpi4py", "baseline mpi4py needs ranks that are processes"),
        ("all_reduce --backend nccl --vs mpi4py", "baseline mpi4py needs arrays of the host"),
        ("all_reduce --backend nccl --empty", "--empty measures memory of the host"),
        ("all_reduce --backend nccl -d bfloat16", "CuPy has no bfloat16 arrays"),
        ("send_recv -n 1", "send_recv needs at least 2 ranks"),
        ("--config none.toml", "the settings file none.toml cannot be read: No such file or directory"),
    ],
)
def test_wrong_use(args: str, says: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        parse(args.split())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("maxbites = 1", "unknown key maxbites (did you mean maxbytes?)"),
        ('config = "x.toml"', "unknown key config"),
        ('check = "yes"', "check should be true or false, not 'yes'"),
        ("iters = true", "iters should be a string, a number or a list of these, not True"),
        ("iters = 1.5", "--iters should be a whole number, not '1.5'"),
        ("[bench]\nranks = 2", "unknown key bench"),
        ("ranks =", "is not valid TOML"),
    ],
)
def test_a_wrong_config_file(text: str, says: str, tmp_path: Any) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse(["all_reduce", "--config", str(path)])
    assert str(caught.value).startswith(f"{path}")
    assert says in str(caught.value)


def test_every_dtype_has_its_bytes() -> None:
    assert {name: expected.dtype_of(name).itemsize for name in DTYPES} == DTYPES


def test_factors_and_sizes_of_four_ranks() -> None:
    # Source: nccl-tests, doc/PERFORMANCE.md
    part, whole = {"all_reduce": 1.5, "reduce": 1, "broadcast": 1, "send_recv": 1}, 0.75
    for name, kind in KINDS.items():
        if kind.empty:
            assert (kind.size(10, 4, 4), kind.count(8, 4, 4)) == (0, 0)
            continue
        size = 40 if name in part else 160
        assert (kind.factor(4), kind.size(10, 4, 4)) == (part.get(name, whole), size)
        assert [kind.count(each, 4, 4) for each in (size, size + 3, 1)] == [10, 10, 1]


@pytest.mark.parametrize(
    ("name", "place", "x", "out"),
    [
        ("all_reduce", "out", ("a", 0, 2), ("b", 0, 2)),
        ("all_reduce", "in", ("a", 0, 2), ("a", 0, 2)),
        ("broadcast", "in", ("a", 0, 2), None),
        ("all_gather", "out", ("a", 0, 2), ("b", 0, 6)),
        ("all_gather", "in", ("a", 2, 4), ("a", 0, 6)),
        ("reduce_scatter", "out", ("a", 0, 6), ("b", 0, 2)),
        ("reduce_scatter", "in", ("a", 0, 6), ("a", 2, 4)),
        ("all_to_all", "out", ("a", 0, 6), ("b", 0, 6)),
        ("barrier", "out", None, None),
    ],
)
def test_buffers_of_the_second_of_three_ranks(name: str, place: collective_table.Place, x: Any, out: Any) -> None:
    buffers = {"a": np.arange(6), "b": np.arange(6)}
    found = collective_table.carve(KINDS[name], place, buffers["a"], buffers["b"], 1, 3, 2)
    for array, where in zip(found, (x, out), strict=True):
        if where is None:
            assert array is None
        else:
            assert np.shares_memory(array, buffers[where[0]])
            assert [*array] == [*range(where[1], where[2])]


def test_a_line_is_found_again() -> None:
    sizes = [8 * 4**i for i in range(12)]
    line = report.fit(sizes, [3e-6 + size / 5e9 for size in sizes])
    assert line is not None
    assert line == pytest.approx((3e-6, 1 / 5e9), rel=1e-9)


@pytest.mark.parametrize(
    ("sizes", "times", "line"),
    [
        ([], [], None),
        ([8, 8], [1.0, 2.0], None),
        ([8, 16], [2.0, 2.0], (2.0, 0.0)),
        ([8, 16], [4.0, 2.0], (2.4, 0.0)),  # falls: the constant whose relative errors are least
        ([1, 2], [1.0, 3.0], (0.0, 15 / 13)),
        ([1, 2, 4], [1.0, 2.0, 4.0], (0.0, 1.0)),
    ],
)
def test_lines(sizes: list[int], times: list[float], line: tuple[float, float] | None) -> None:
    assert report.fit(sizes, times) == (None if line is None else pytest.approx(line, abs=1e-12))


@pytest.mark.parametrize(
    ("estimates", "budget", "iters", "rounds", "calls"),
    [
        ([1e-6], 0.1, None, 20, [5000]),
        ([1e-9], 0.1, None, 20, [5000]),
        ([1e-6, 1e-3], 0.1, None, 20, [5000, 5]),
        ([1e-6, 1e-2], 0.1, None, 10, [10_000, 1]),
        ([1e-3, 1.0], 0.1, None, 5, [20, 1]),
        ([1e-6, 1.0], 0.1, 3, 3, [1, 1]),
        ([1e-6], 0.1, 100, 20, [5]),
        ([1e-6], 0.1, 101, 20, [6]),
    ],
)
def test_plans(estimates: list[float], budget: float, iters: int | None, rounds: int, calls: list[int]) -> None:
    assert worker.plan(estimates, budget, iters) == (rounds, calls)


def test_a_ratio_compares_what_was_measured_side_by_side() -> None:
    ours = worker.Timing(seconds=2.0, rounds=(1.0, 2.0, 40.0), calls=3)  # noise in the last round hit both
    other = worker.Timing(seconds=6.0, rounds=(3.0, 6.0, 120.0), calls=3)
    assert worker.ratio(other, ours) == 3.0


class Clockless:
    """A sync of one rank that pretends to be the faster of two."""

    def __init__(self) -> None:
        self.met = 0

    def barrier(self) -> None:
        self.met += 1

    def slowest(self, seconds: Any) -> Any:
        return seconds + 1.0

    def total(self, number: int) -> int:
        return number


def test_implementations_alternate_and_the_slowest_rank_counts() -> None:
    calls: list[str] = []
    entries = [worker.Entry(call=lambda name=name: calls.append(name), settle=lambda: None) for name in "ab"]
    sync = Clockless()
    found = worker.measure(entries, sync, warmup=2, budget=1.0, iters=3)
    assert "".join(calls) == "aaabbb" + "ab" + "ba" + "ab"  # one to begin with and two to warm up; then three rounds
    assert sync.met == 2 + 6
    assert [timing.calls for timing in found] == [3, 3]
    assert all(1.0 < each < 2.0 for timing in found for each in timing.rounds)


CELL = report.Cell(seconds=12.5e-6, algbw=5.243, busbw=7.8643, calls=20, rounds=(12e-6, 13e-6), wrong=0)
ROW = report.Row(
    collective="all_reduce",
    by="ours mpi",
    size=65536,
    count=16384,
    dtype="float32",
    op="sum",
    root=-1,
    cells={"in": CELL},
)


def test_a_table_of_one() -> None:
    lines = [*report.heading(several=False), report.row_line(ROW, several=False)]
    assert [line.split() for line in lines] == [
        ["#", "out-of-place", "in-place"],
        ["#", "size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2],
        ["#", "(B)", "(elements)", *["(us)", "(GB/s)", "(GB/s)"] * 2],
        ["65536", "16384", "float32", "sum", "-1", "-", "-", "-", "-", "12.50", "5.243", "7.864", "0"],
    ]
    # Right under right: the last column of the names, and that of the numbers.
    assert len(lines[1]) == len(lines[3])
    assert [lines[1].rindex(name) + len(name) for name in ("size", "count")] == [12, 24]
    assert max(map(len, lines)) <= 120


def test_a_table_of_many_names_them_and_their_ratio() -> None:
    baseline = report.Row(
        **{**vars(ROW), "by": "mpi4py", "cells": {"out": report.Cell(**{**vars(CELL), "ratio": 1.204})}}
    )
    heads = report.heading(several=True)
    lines = [report.row_line(row, several=True) for row in (ROW, baseline)]
    assert heads[1].split()[1:7] == ["size", "count", "type", "redop", "root", "by"]
    assert heads[1].split().count("ratio") == 2
    assert "   -1 ours mpi " in lines[0]
    assert " ".join(lines[1].split()) == "65536 16384 float32 sum -1 mpi4py 12.50 5.243 7.864 0 1.20 - - - - -"
    assert heads[1].index("by") == lines[1].index("mpi4py")


def test_an_outcome_as_json() -> None:
    fitted = report.Fitted(
        collective="all_reduce", by="ours mpi", dtype="float32", place="in", line=report.Line(1e-6, 2.5e-10)
    )
    outcome = Outcome(
        backend="mpi", ranks=2, nodes=1, versions={"numpy": "2"}, rows=(ROW,), fits=(fitted,), unsupported=("no",)
    )
    document = json.loads(json.dumps(outcome.encode()))
    assert (document["fits"][0]["latency_us"], document["fits"][0]["bandwidth_gbs"]) == pytest.approx((1.0, 4.0))
    assert document["rows"][0]["cells"]["in"]["rounds"] == [12e-6, 13e-6]


def test_inputs_tell_ranks_and_places_apart() -> None:
    moved = KINDS["all_gather"]
    parts = [expected.source(moved, rank, 0, 4096, np.dtype(np.int8), "sum") for rank in range(3)]
    assert not np.array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0][:2048], parts[0][2048:])  # blocks of a power of two do not repeat
    assert max(part.max() for part in parts) < expected.POISON
    whole = expected.source(moved, 1, 0, 4096, np.dtype(np.int8), "sum")
    assert np.array_equal(expected.source(moved, 1, 1500, 10, np.dtype(np.int8), "sum"), whole[1500:1510])


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_reduction_is_exact(name: str, op: str) -> None:
    dtype = expected.dtype_of(name)
    if (name == "bool" and op not in ("max", "min")) or (name.startswith("complex") and op in ("max", "min")):
        return
    kind = KINDS["reduce_scatter"]
    parts = [expected.source(kind, rank, 0, 300, dtype, op).astype(np.complex128) for rank in range(3)]
    must = {
        "sum": sum(parts),
        "mean": sum(parts) / 3,
        "prod": parts[0] * parts[1] * parts[2],
        "max": np.max(np.real(parts), axis=0),
        "min": np.min(np.real(parts), axis=0),
    }[op][200:]
    if op == "mean" and dtype.kind in "iu":
        must = np.trunc(np.real(must))
    got = expected.result(kind, 2, 3, 100, dtype, op)
    assert got is not None
    assert got.dtype == dtype
    assert np.allclose(got.astype(np.complex128), must, rtol=0.01 if op == "mean" else 0)
    if name != "bool":
        assert expected.POISON not in got


def test_wrong_elements_are_counted() -> None:
    must = np.arange(8, dtype=np.float32)
    got = must.copy()
    assert expected.wrong(got, must, "sum") == 0
    got[[1, 5]] = np.nan, 7.5
    assert expected.wrong(got, must, "sum") == expected.wrong(got, must, "mean") == 2
    near = np.nextafter(must, np.float32(9))
    assert expected.wrong(near, must, "sum") == 8
    assert expected.wrong(near[1:], must[1:], "mean") == 0
    bf16 = expected.dtype_of("bfloat16")
    assert expected.wrong(np.array([3.0625], bf16), np.array([3.0], bf16), "mean") == 0
    assert expected.wrong(np.array([3.125], bf16), np.array([3.0], bf16), "mean") == 1
