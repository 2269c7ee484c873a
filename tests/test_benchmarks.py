"""What a benchmark of collectives says can be wrong: who is called, what is counted, what is promised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import collectives
from benchmarks.collectives import KIB, MIB, ROWS, Goal, goals, moved, size
from benchmarks.contestants import SHAPES, expected, ours
from benchmarks.rounds import buffers, checked

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_scripts_beside_collectives_py_find_the_package(
    run_job: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import collectives, ddp; print(collectives.init().size)"
    done = run_job([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_our_calls_do_what_the_others_do(name: str, ranks: int) -> None:
    def main(comm: collectives.Communicator) -> None:
        for in_place in (False, True):
            x, y = buffers(name, 12, comm, lambda k: np.empty(k, np.float32))
            read = SHAPES[name].in_place or (name == "all_reduce" and in_place)
            checked(name, "ours", ours(name, in_place)(comm, x, y), x, y, read, comm)
            assert not x.any()
            assert not y.any()

    collectives.run_threads(main, size=ranks)


def test_a_contestant_that_computes_something_else_is_found_out() -> None:
    def main(comm: collectives.Communicator) -> None:
        x, y = buffers("all_reduce", 4, comm, lambda k: np.empty(k, np.float32))
        with pytest.raises(SystemExit, match="all_reduce gave"):
            checked("all_reduce", "lazy", lambda: None, x, y, False, comm)

    collectives.run_threads(main, size=2)


def test_expected_is_what_the_collectives_are_for() -> None:
    assert [expected("gather", rank, 2, 4) is None for rank in (0, 1)] == [False, True]
    assert np.array_equal(expected("all_gather", 1, 2, 4), [1, 1, 2, 2])
    assert np.array_equal(expected("reduce_scatter", 1, 2, 4), [3, 3])
    assert np.array_equal(expected("send, recv", 1, 3, 1), [1])
    assert expected("send, recv", 2, 3, 1) is None


def test_goals_are_those_of_their_row() -> None:
    us = {"ours": [10.0, 11.0], "raw": [8.0, 8.0], "gloo": [400.0, 500.0], "comm.empty": [20.0, 20.0]}

    def said(name: str, nbytes: int) -> list[tuple[str, str, float | None, bool | None]]:
        return [(g.what, g.wanted, g.measured, g.met) for g in goals(name, nbytes, us)]

    assert said("all_reduce", KIB)[0] == ("all_reduce 1 KiB: ours - raw", "<= 3", 2.5, True)
    assert said("all_reduce", KIB)[1] == ("all_reduce 1 KiB: ours, out - raw, out", "<= 3", None, None)
    assert said("all_reduce", MIB)[0] == ("all_reduce 1 MiB: gloo / comm.empty", ">= 15", 22.5, True)
    assert said("gather", MIB)[0] == ("gather 1 MiB: ours / raw", "<= 1.1", 1.3125, False)
    assert {name for name, _ in ROWS} == set(SHAPES)
    assert all(isinstance(goal, Goal) for name, nbytes in ROWS for goal in goals(name, nbytes, us))


def test_bytes_are_counted_once_read_and_once_written_a_rank() -> None:
    assert moved(2, 100) == 2 * 100 + 2 * 100
    assert [size(n) for n in (0, 8, 1024, 65536, 25 << 20)] == ["", "8 B", "1 KiB", "64 KiB", "25 MiB"]
