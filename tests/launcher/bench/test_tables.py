"""The pure parts of ddp-bench, as tables: what goes in, what comes out."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from launcher.bench import collective_table, expected, report, runner
from launcher.bench.collective_table import KINDS
from launcher.bench.settings import DTYPES, Settings, parse, parse_size
from launcher.errors import UsageError


def test_sizes_are_written_in_powers_of_1024() -> None:
    assert [*map(parse_size, ("8", "4K", "128M", "128m", "1G"))] == [8, 4096, 128 << 20, 128 << 20, 1 << 30]
    for text in ("", "M", "0", "1.5M", "-8", "8 K", "1T", "1KiB"):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            parse_size(text)


@pytest.mark.parametrize(
    ("args", "sizes"),
    [("-b 8 -e 128 -f 4", [8, 32, 128]), ("-b 8 -e 127 -f 4", [8, 32]), ("-b 8 -e 8", [8]), ("-b 64M", [64 << 20])],
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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "no collective to measure: ddp-bench all, or one of all_reduce, reduce"),
        ("all_reduc", "names an unknown collective: all_reduc (did you mean all_reduce?)"),
        ("all_reduce -b x", "-b/--minbytes should be bytes, as 512, 64K, 128M or 1G, not 'x'"),
        ("all_reduce -b 8 -e 4", "maxbytes (4) is smaller than minbytes (8)"),
        ("all_reduce -f 1", "stepfactor should be at least 2, not 1"),
        ("all_reduce -n 0", "-n/--ranks should be a positive whole number, not '0'"),
        ("all_reduce -n", "-n/--ranks expected one argument"),
        ("all_reduce --chekc", "unknown option --chekc (did you mean --check?)"),
        ("all_reduce --backend mpii", "--backend invalid choice: 'mpii'"),
        ("all_reduce -d float23", "names an unknown dtype: float23 (did you mean float32?)"),
        ("all_reduce -n 2 --backend single", "backend single is a world of one: -n 1"),
        ("all_reduce --backend threads --vs mpi4py", "backend threads has no baselines"),
        ("all_reduce --backend nccl --empty", "--empty measures memory of the host"),
        ("all_reduce --backend nccl -d bfloat16", "CuPy has no bfloat16 arrays"),
    ],
)
def test_wrong_use(args: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(args.split())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


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
    assert runner.plan(estimates, budget, iters) == (rounds, calls)


def test_a_ratio_compares_what_was_measured_side_by_side() -> None:
    ours = runner.Timing(rounds=(1.0, 2.0, 40.0), calls=3)  # noise in the last round hit both
    other = runner.Timing(rounds=(3.0, 6.0, 120.0), calls=3)
    assert runner.ratio(other, ours) == 3.0


def test_implementations_alternate_and_the_slowest_rank_counts() -> None:
    calls: list[str] = []
    barrier, *names = (partial(calls.append, name) for name in "|ab")
    entries = [runner.Entry(call=name, settle=lambda: None) for name in names]
    options: dict[str, Any] = {"warmup": 2, "budget": 1.0, "iters": 3}
    found = runner.measure(entries, barrier, lambda seconds: seconds + 1.0, **options)
    # One call to begin with and two to warm up; then three rounds.
    assert "".join(calls) == "a|aab|bb" + "|a|b" + "|b|a" + "|a|b"
    assert [timing.calls for timing in found] == [3, 3]
    assert all(1.0 < each < 2.0 for timing in found for each in timing.rounds)


ROW = report.Row(
    collective="all_reduce",
    size=65536,
    count=16384,
    dtype="float32",
    op="sum",
    place="in",
    by="ours mpi",
    seconds=12.5e-6,
    algbw=5.243,
    busbw=7.8643,
    calls=20,
    rounds=(12e-6, 13e-6),
    wrong=0,
)


def test_a_table() -> None:
    *words, titles, units = report.heading(KINDS["all_reduce"], 4, 1, "mpi")
    assert words[0] == "# all_reduce: 4 ranks on 1 node, backend mpi"
    assert "busbw = algbw * 1.5; " in words[2]
    lines = [report.line(ROW), report.line(dataclasses.replace(ROW, by="mpi4py", ratio=1.204, wrong=None))]
    left = "65536 16384 float32 sum in"
    assert [" ".join(line.split()) for line in lines] == [
        f"{left} ours mpi 12.50 5.243 7.864 0",
        f"{left} mpi4py 12.50 5.243 7.864 N/A 1.20",
    ]
    # Right under right.
    assert len(titles) == len(lines[1])
    assert titles.index("#wrong") + 6 == len(lines[0])
    assert units.split() == ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]


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
