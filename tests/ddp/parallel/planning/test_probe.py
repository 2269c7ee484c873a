"""The measured link: the same on every rank, whatever each of them measures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from collectives import Communicator, run_threads
from ddp.parallel.planning import probe
from ddp.parallel.planning.choosing import Link


class Counting:
    """A communicator that notes which collectives are called, and with how many bytes."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank
        self.calls: list[tuple[str, int]] = []

    def empty(self, length: int, dtype: Any) -> Any:
        array = self._comm.empty(length, dtype)
        self.calls.append(("empty", array.nbytes))
        return array

    def all_reduce(self, array: Any, *args: Any, **options: Any) -> Any:
        self.calls.append(("all_reduce", array.nbytes))
        return self._comm.all_reduce(array, *args, **options)

    def broadcast(self, array: Any, root: int) -> Any:
        self.calls.append(("broadcast", array.nbytes))
        return self._comm.broadcast(array, root)


def each(size: int) -> list[tuple[str, int]]:
    return [("all_reduce", size)] * (10 if size <= 1 << 16 else 3) + [("all_reduce", 8)]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_numbers(size: int) -> None:
    links = run_threads(lambda comm: probe.measure(comm, 1 << 18), size)
    assert len(set(links)) == 1
    assert links[0].alpha >= 0
    assert links[0].beta >= 0
    assert links[0].alpha + links[0].beta > 0


def test_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> list[tuple[str, int]]:
        counting = Counting(comm)
        probe.measure(counting, 1 << 18)  # type: ignore[arg-type]  # as much of one as it needs
        return counting.calls

    monkeypatch.setattr(probe, "_LONG", float("inf"))
    sizes = [1 << 12, 1 << 14, 1 << 16, 1 << 18]
    calls = [("empty", 1 << 18), ("all_reduce", 4), *itertools.chain(*map(each, sizes)), ("broadcast", 16)]
    assert run_threads(run, 2) == [calls] * 2


@pytest.mark.parametrize(("most", "largest"), [(0, 1 << 16), (1 << 17, 1 << 16), (1 << 30, 1 << 24)])
def test_sizes(most: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> int:
        counting = Counting(comm)
        probe.measure(counting, most)  # type: ignore[arg-type]
        return max(size for _, size in counting.calls)

    monkeypatch.setattr(probe, "_LONG", float("inf"))
    assert run_threads(run, 2) == [largest] * 2


def test_one_slow_rank_ends_it_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 alone sees 16 KiB take long: all stop there, and all fit rank 1's times, the fastest of each size."""
    fastest = {0: (0.002, 0.002), 1: (0.004, 0.016)}
    scripts = {
        rank: iter([9.0, *[5.0] * 4, first, *[5.0] * 5, *[5.0] * 8, second, 5.0])
        for rank, (first, second) in fastest.items()
    }
    real = probe._seconds

    def seconds(comm: Any, array: Any) -> float:
        real(comm, array)
        return next(scripts[comm.rank])

    def run(comm: Communicator) -> tuple[Link, list[tuple[str, int]]]:
        counting = Counting(comm)
        return probe.measure(counting, 1 << 22), counting.calls  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "_seconds", seconds)
    links, calls = zip(*run_threads(run, 2), strict=True)
    expected = [("empty", 1 << 22), ("all_reduce", 4), *each(1 << 12), *each(1 << 14), ("broadcast", 16)]
    assert calls == (expected, expected)
    assert links[0] == links[1]
    assert (links[0].alpha, links[0].beta) == pytest.approx((0.0, 0.004 / 4096), abs=1e-12)


def test_one_rank_costs_nothing() -> None:
    def run(comm: Communicator) -> tuple[Link, list[tuple[str, int]]]:
        counting = Counting(comm)
        return probe.measure(counting, 1 << 22), counting.calls  # type: ignore[arg-type]

    assert run_threads(run, 1) == [(Link(alpha=0.0, beta=0.0), [])]
