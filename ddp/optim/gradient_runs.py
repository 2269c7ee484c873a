"""Runs: which gradients an update walks as one flat array, and the tiles it walks them in.

Many small tensors cost calls, large ones cost passes over memory. So neighbours are updated together, and what is long
is cut into tiles that stay in cache from a formula's first pass to its last. These functions decide; `Memory` acts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Home(NamedTuple):
    """Where in a flat buffer a gradient starts. buffer: a number that names the buffer; start: elements."""

    buffer: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What is to be known of one gradient.

    size: elements; line: elements of its dtype in a cache line; kind: only gradients of one kind stand together
    home: None for a gradient in an array of its own; rigid: it, or its parameter, is not contiguous, so that neither
    can be cut
    """

    size: int
    line: int
    kind: Hashable = None
    home: Home | None = None
    rigid: bool = False


class Member(NamedTuple):
    """One gradient's place in its segment: its number, and where it starts and stops."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Gradients whose state lies in one flat array.

    flat: the gradients themselves lie in one flat array too, at the same distances; else they are to be gathered
    rigid: the one gradient cannot be cut
    """

    members: tuple[Member, ...]
    flat: bool
    rigid: bool = False

    @property
    def length(self) -> int:
        """Elements from the first member's start to the last one's stop."""
        return self.members[-1].stop


class Part(NamedTuple):
    """Elements `begin` to `end` of one gradient, which stand in a tile from `at` on."""

    number: int
    begin: int
    end: int
    at: int


class Cut(NamedTuple):
    """A tile: elements `start` to `stop` of its segment, and what stands there."""

    start: int
    stop: int
    parts: tuple[Part, ...]


def arrange(gradients: Sequence[Gradient], *, pack: int, cap: int) -> list[Segment]:
    """Puts every gradient into a segment.

    Those that follow each other in a flat buffer stay as they lie; of the others, ones of at most `pack` elements are
    packed to segments of about `cap` elements, and larger ones stand alone.
    """
    segments = []
    chain: list[int] = []
    # An empty gradient starts where the next one does, and stands before it.
    homed = sorted((g.home, g.size, index) for index, g in enumerate(gradients) if g.home is not None and not g.rigid)
    for _, _, index in homed:
        if chain and not _follows(gradients[chain[-1]], gradients[index]):
            segments.append(_segment(chain, gradients, flat=True))
            chain = []
        chain.append(index)
    if chain:
        segments.append(_segment(chain, gradients, flat=True))
    packs: dict[Hashable, list[int]] = {}
    for index, g in enumerate(gradients):
        if g.rigid:
            segments.append(_segment([index], gradients, flat=False, rigid=True))
        elif g.home is None and g.size > pack:
            segments.append(_segment([index], gradients, flat=True))
        elif g.home is None:
            members = packs.setdefault(g.kind, [])
            if members and _segment([*members, index], gradients, flat=False).length > cap:
                segments.append(_segment(members, gradients, flat=len(members) == 1))
                members.clear()
            members.append(index)
    segments += [_segment(members, gradients, flat=len(members) == 1) for members in packs.values()]
    return segments


def find_runs(segment: Segment, marks: Sequence[Hashable | None]) -> list[tuple[Member, ...]]:
    """The longest stretches of members with one mark. marks: of each gradient, None for an empty one."""
    runs: list[list[Member]] = []
    before = None
    for member in segment.members:
        mark = marks[member.number]
        if mark is not None:
            if mark != before:
                runs.append([])
            runs[-1].append(member)
        before = mark
    return [tuple(run) for run in runs]


def cut(run: Sequence[Member], size: int) -> list[Cut]:
    """Cuts a run into tiles of at most `size` elements; members of no elements are left out."""
    first, last = run[0].start, run[-1].stop
    tiles = []
    position = 0
    for start in range(first, last, size):
        stop = min(start + size, last)
        parts = []
        for member in run[position:]:
            if member.start >= stop:
                break
            begin, end = max(member.start, start), min(member.stop, stop)
            if begin < end:
                parts.append(Part(member.number, begin - member.start, end - member.start, begin - start))
            if member.stop <= stop:
                position += 1
        tiles.append(Cut(start, stop, tuple(parts)))
    return [tile for tile in tiles if tile.parts]


def _follows(before: Gradient, after: Gradient) -> bool:
    assert before.home is not None
    assert after.home is not None
    expected = _up(before.home.start + before.size, before.line)
    return before.kind == after.kind and after.home == Home(before.home.buffer, expected)


def _segment(indices: Sequence[int], gradients: Sequence[Gradient], *, flat: bool, rigid: bool = False) -> Segment:
    members = []
    start = 0
    for index in indices:
        g = gradients[index]
        members.append(Member(index, start, start + g.size))
        start = _up(start + g.size, g.line)
    return Segment(members=tuple(members), flat=flat, rigid=rigid)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
