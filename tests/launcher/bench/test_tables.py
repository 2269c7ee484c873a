"""The pure parts of ddp-bench, as tables: what goes in, what comes out."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import numpy as np
import pytest

from launcher.bench import expected, report, runner
from launcher.bench.collective_table import COLLECTIVES
from launcher.bench.settings import Settings, parse, parse_size
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
    assert parse(["all"]).collectives == tuple(COLLECTIVES)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "no collective to measure: ddp-bench all, or one of all_reduce, reduce"),
        ("all_reduc", "names an unknown collective: all_reduc (did you mean all_reduce?)"),
        ("all_reduce -b x", "-b/--minbytes should be bytes, as 512, 64K, 128M or 1G, not 'x'"),
        ("all_reduce -b 8 -e 4", "maxbytes (4) is smaller than minbytes (8)"),
        ("all_reduce -f 1", "stepfactor should be at least 2, not 1"),
        ("all_reduce --chekc", "unknown option --chekc (did you mean --check?)"),
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
    part = {"all_reduce": 1.5, "reduce": 1, "broadcast": 1, "send_recv": 1}
    whole = 0.75
    for name, collective in COLLECTIVES.items():
        if collective.empty:
            assert (collective.size(10, 4, 4), collective.count(8, 4, 4)) == (0, 0)
            continue
        size = 40 if name in part else 160
        assert (collective.factor(4), collective.size(10, 4, 4)) == (part.get(name, whole), size)
        assert [collective.count(each, 4, 4) for each in (size, size + 3, 1)] == [10, 10, 1]


@pytest.mark.parametrize(
    ("estimates", "budget", "iters", "rounds", "calls"),
    [
        ([1e-6], 0.1, None, 20, [5000]),
        ([1e-6, 1e-3], 0.1, None, 20, [5000, 5]),
        ([1e-3, 1.0], 0.1, None, 5, [20, 1]),
        ([1e-6, 1.0], 0.1, 3, 3, [1, 1]),
        ([1e-6], 0.1, 21, 11, [2]),
        ([1e-6], 0.1, 101, 17, [6]),
    ],
)
def test_plans(estimates: list[float], budget: float, iters: int | None, rounds: int, calls: list[int]) -> None:
    assert runner.plan(estimates, budget, iters) == (rounds, calls)


def test_a_ratio_compares_what_was_measured_side_by_side() -> None:
    ours = (1.0, 2.0, 40.0)  # noise in the last round hit both
    assert report.median_ratio((3.0, 6.0, 120.0), ours) == 3.0


def test_implementations_alternate_and_the_slowest_rank_counts() -> None:
    calls: list[str] = []
    barrier, *names = (partial(calls.append, name) for name in "|ab")
    entries = [runner.Entry(call=name, settle=lambda: None) for name in names]
    settings = Settings(collectives=("barrier",), warmup=2, iters=3)
    actual = runner.measure(entries, barrier, lambda seconds: seconds + 1.0, settings)
    # One call to begin with and two to warm up; then three rounds.
    assert "".join(calls) == "a|aab|bb" + "|a|b" + "|b|a" + "|a|b"
    assert [timing.calls for timing in actual] == [3, 3]
    assert all(1.0 < each < 2.0 for timing in actual for each in timing.rounds)


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
    words = report.heading(COLLECTIVES["all_reduce"], 4, 1, "mpi")
    assert words[0] == "# all_reduce: 4 ranks on 1 node, backend mpi"
    assert "busbw = algbw * 1.5; " in words[2]
    lines = [report.line(ROW), report.line(dataclasses.replace(ROW, by="mpi4py", ratio=1.204, wrong=None))]
    left = "65536 16384 float32 sum in"
    assert [" ".join(line.split()) for line in lines] == [
        f"{left} ours mpi 12.50 5.243 7.864 0",
        f"{left} mpi4py 12.50 5.243 7.864 N/A 1.20",
    ]


def test_inputs_tell_ranks_and_places_apart() -> None:
    moved = COLLECTIVES["all_gather"]
    parts = [expected.source(moved, rank, 0, 4096, np.dtype(np.int8), "sum") for rank in range(3)]
    assert not np.array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0][:2048], parts[0][2048:])  # blocks of a power of two do not repeat
    assert max(part.max() for part in parts) < expected.POISON
    whole = expected.source(moved, 1, 0, 4096, np.dtype(np.int8), "sum")
    assert np.array_equal(expected.source(moved, 1, 1500, 10, np.dtype(np.int8), "sum"), whole[1500:1510])


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
