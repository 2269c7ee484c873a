"""Which gradients are walked together, and in what tiles: tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ddp.optim.flat_update import Gradient, Member, Part, Segment, Tile, arrange, cut, find_runs


def gradient(size: int, buffer: int | None = None, start: int = 0, dtype: str = "", rigid: bool = False) -> Gradient:
    home = None if buffer is None else (buffer, start)
    return Gradient(size=size, line=16, dtype=dtype, home=home, rigid=rigid)


def test_gradients_in_a_buffer_stay_as_they_lie() -> None:
    # 2 lies before 0, an empty one between them; 1 is behind a gap that is no padding; 4 is in another buffer.
    found = arrange(
        [gradient(17, 7, 16), gradient(4, 7, 64), gradient(15, 7, 0), gradient(0, 7, 16), gradient(3, 8, 48)],
        pack=100,
        cap=100,
    )
    assert found == [
        Segment(members=(Member(2, 0, 15), Member(3, 16, 16), Member(0, 16, 33)), flat=True),
        Segment(members=(Member(1, 0, 4),), flat=True),
        Segment(members=(Member(4, 0, 3),), flat=True),
    ]


def test_small_gradients_are_packed_and_large_ones_stand_alone() -> None:
    found = arrange(
        [
            gradient(20),
            gradient(101),
            gradient(10),
            gradient(50),
            gradient(5, dtype="float64"),
            gradient(9, rigid=True),
        ],
        pack=100,
        cap=64,
    )
    assert found == [
        Segment(members=(Member(0, 0, 20), Member(2, 32, 42)), flat=False),
        Segment(members=(Member(3, 0, 50),), flat=True),
        Segment(members=(Member(4, 0, 5),), flat=True),
        Segment(members=(Member(1, 0, 101),), flat=True),
        Segment(members=(Member(5, 0, 9),), flat=False, rigid=True),
    ]


@pytest.mark.parametrize(
    ("marks", "runs"),
    [
        ([1, 1, 1, 1], [[0, 1, 2, 3]]),
        ([1, None, 1, 1], [[0], [2, 3]]),
        ([None, 2, 2, None], [[1, 2]]),
        ([1, 2, 2, 1], [[0], [1, 2], [3]]),
        ([None] * 4, []),
    ],
)
def test_a_run_ends_at_an_empty_slot_and_where_the_age_changes(marks: list[int | None], runs: list[list[int]]) -> None:
    segment = arrange([gradient(10, 1, 16 * i) for i in range(4)], pack=0, cap=0)[0]
    assert [[member.number for member in run] for run in find_runs(segment, marks)] == runs


def test_tiles() -> None:
    run = [Member(3, 16, 21), Member(1, 32, 32), Member(0, 32, 52)]
    assert cut(run, 20) == [
        Tile(16, 36, (Part(3, 0, 5, 0), Part(0, 0, 4, 16))),
        Tile(36, 52, (Part(0, 4, 20, 0),)),
    ]
    assert cut([Member(0, 0, 0)], 20) == []
    # A tile that falls into padding is none.
    assert cut([Member(0, 0, 4), Member(1, 16, 17)], 4) == [
        Tile(0, 4, (Part(0, 0, 4, 0),)),
        Tile(16, 17, (Part(1, 0, 1, 0),)),
    ]


def test_every_element_is_in_one_tile() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(0, 60, random.integers(1, 9)).tolist()
        starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
        homed = random.random() < 0.5
        gradients = [gradient(size, 1 if homed else None, start) for size, start in zip(sizes, starts, strict=False)]
        seen = [np.zeros(size, int) for size in sizes]
        for segment in arrange(gradients, pack=30, cap=64):
            for run in find_runs(segment, [0] * len(sizes)):
                for start, stop, parts in cut(run, int(random.integers(1, 50))):
                    for number, begin, end, at in parts:
                        seen[number][begin:end] += 1
                        member = next(member for member in segment.members if member.number == number)
                        assert start + at == member.start + begin
                        assert at + end - begin <= stop - start
        assert all((each == 1).all() for each in seen)
