"""What many ranks print alike is shown once, as tables: nothing is lost, each rank's lines keep their order."""

from __future__ import annotations

import random

import pytest

from launcher.output.collapse import Collapser, Group
from launcher.output.labels import Labels, ranges, short


def groups(lines: list[tuple[float, int, str]], n: int, window: float = 0.3) -> list[tuple[tuple[int, ...], str, int]]:
    """Feeds (time, rank, text), one by one, and shows what comes out, in order."""
    collapser = Collapser(n, window)
    out: list[Group] = []
    for now, rank, text in lines:
        out += collapser.take(now)
        collapser.feed(rank, "out", text.encode(), now)
    out += collapser.drain()
    assert collapser.deadline == float("inf")
    return [(group.ranks, group.text.decode(), group.times) for group in out]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([(0, 0, "a"), (0, 1, "a"), (0, 2, "a")], [((0, 1, 2), "a", 1)]),
        ([(0, 2, "a"), (0, 0, "a")], [((0, 2), "a", 1)]),
        ([(0, 0, "a"), (0, 1, "b")], [((0,), "a", 1), ((1,), "b", 1)]),
        # another line between two alike: both ranks say a, then b
        ([(0, 0, "a"), (0, 0, "b"), (0, 1, "a"), (0, 1, "b")], [((0, 1), "a", 1), ((0, 1), "b", 1)]),
        # rank 1 says them the other way round: its a cannot come before its b
        ([(0, 0, "a"), (0, 0, "b"), (0, 1, "b"), (0, 1, "a")], [((0,), "a", 1), ((0, 1), "b", 1), ((1,), "a", 1)]),
        # the same line again and again
        ([(0, 0, "a"), (0, 0, "a"), (0, 0, "a")], [((0,), "a", 3)]),
        ([(0, 0, "a"), (0, 0, "a"), (0, 1, "a"), (0, 1, "a")], [((0, 1), "a", 2)]),
        ([(0, 0, "a"), (0, 0, "a"), (0, 1, "a")], [((0,), "a", 2), ((1,), "a", 1)]),
        # too late to be the same
        ([(0, 0, "a"), (0.31, 1, "a")], [((0,), "a", 1), ((1,), "a", 1)]),
        ([(0, 0, "a"), (0.29, 1, "a")], [((0, 1), "a", 1)]),
        # said by all: it waits for nobody, and what follows is another
        ([(0, 0, "a"), (0, 1, "a"), (0, 2, "a"), (0.1, 0, "a")], [((0, 1, 2), "a", 1), ((0,), "a", 1)]),
        (
            [(0, 0, "x"), (0, 0, "a"), (0, 0, "x"), (0, 1, "a"), (0, 1, "x")],
            [((0,), "x", 1), ((0, 1), "a", 1), ((0, 1), "x", 1)],
        ),
    ],
)
def test_groups(lines: list[tuple[float, int, str]], expected: list[tuple[tuple[int, ...], str, int]]) -> None:
    assert groups(lines, n=3) == expected


def test_a_line_of_all_ranks_waits_for_nobody_and_others_no_longer_than_the_window() -> None:
    collapser = Collapser(n=2)
    collapser.feed(0, "out", b"a", now=1.0)
    assert (collapser.take(1.0), collapser.deadline) == ([], 1.3)
    collapser.feed(1, "out", b"a", now=1.1)
    assert collapser.take(1.1) == [Group((0, 1), "out", b"a", 1)]
    collapser.feed(1, "err", b"b", now=2.0)
    assert collapser.take(2.29) == []
    assert collapser.take(2.3) == [Group((1,), "err", b"b", 1)]


def test_streams_are_apart_but_in_order() -> None:
    collapser = Collapser(n=2)
    for rank in (0, 1):
        collapser.feed(rank, "out", b"a", now=0.0)
        collapser.feed(rank, "err", b"a", now=0.0)
    assert collapser.drain() == [Group((0, 1), "out", b"a", 1), Group((0, 1), "err", b"a", 1)]


def test_a_flood_waits_in_bounded_memory() -> None:
    collapser = Collapser(n=2, limit=10)
    for number in range(100):
        collapser.feed(0, "out", b"%d" % number, now=0.0)
    assert len(collapser.take(0.0)) == 90


def test_nothing_is_lost_and_every_rank_keeps_its_order() -> None:
    """Whatever ranks say, whenever: from the groups each rank's lines can be read again, in order."""
    generator = random.Random(0)
    for _ in range(200):
        n = generator.randint(1, 5)
        lines, now = [], 0.0
        for _ in range(generator.randint(0, 60)):
            now += generator.choice([0.0, 0.0, 0.01, 0.2])
            lines.append((now, generator.randrange(n), generator.choice("abc")))
        found: list[list[str]] = [[] for _ in range(n)]
        for ranks, text, times in groups(lines, n):
            for rank in ranks:
                found[rank] += [text] * times
        assert found == [[text for _, rank, text in lines if rank == each] for each in range(n)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1], "0,1"), ([2, 1, 0], "0-2"), ([0, 2, 5], "0,2,5"), ([0, 1, 2, 4, 6, 7, 8], "0-2,4,6-8")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_labels() -> None:
    one = Labels(12)
    one.add(0, "node1")
    one.add(1, "node1")
    assert (one[0], one[11], one.width) == (" 0", "11", 2)
    one.add(2, "node17")
    assert (one[0], one[2], one[11], one.width) == ("  node1:0", " node17:2", "       11", 9)
    known = Labels(2, ["a.cluster", "bb.cluster"])
    known.add(0, "a.other")
    assert (known[0], known[1], known.width) == (" a:0", "   1", 4)


@pytest.mark.parametrize(
    ("host", "name"),
    [("node7", "node7"), ("node7.cluster.org", "node7"), ("10.0.0.7", "10.0.0.7"), ("fe80::1", "fe80::1")],
)
def test_short_names(host: str, name: str) -> None:
    assert short(host) == name
