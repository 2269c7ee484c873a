"""What is printed: rows and columns as nccl-tests has them, and lines of words around them. Text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.bench.fit import Line
from launcher.bench.kinds import PLACES, Kind, Place


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contestant's result for one size in one place.

    seconds: of one call; algbw, busbw: GB/s; wrong: elements, None if nobody looked; calls: measured; rounds: seconds
    of each; ratio: how many times as long as ours on ordinary arrays it takes, None for ours
    """

    seconds: float
    algbw: float
    busbw: float
    calls: int
    rounds: tuple[float, ...]
    wrong: int | None = None
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant's results for one size. size: bytes; count: elements; without op "none", without root -1."""

    collective: str
    by: str
    size: int
    count: int
    dtype: str
    op: str
    root: int
    cells: Mapping[Place, Cell]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A contestant's latency and bandwidth for one collective."""

    collective: str
    by: str
    dtype: str
    place: Place
    line: Line


_LEFT = (("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 10), ("redop", "", 6), ("root", "", 5))
_BY = 19
_CELL = (("time", "(us)", 10), ("algbw", "(GB/s)", 9), ("busbw", "(GB/s)", 9), ("#wrong", "", 8))
_RATIO = 8


def heading(several: bool) -> list[str]:
    """The lines above a table. several: there is more than one contestant, so columns say who and how many times."""
    left = sum(width for *_, width in _LEFT) + several * _BY
    block = sum(width for *_, width in _CELL) + several * _RATIO
    places = "".join(name.center(block) for name in PLACES.values())
    cells = (*_CELL, ("ratio", "", _RATIO)) if several else _CELL
    lines = [" " * left + places]
    for which in (0, 1):
        words = "".join(f"{column[which]:>{column[2]}}" for column in _LEFT)
        words += " " * several + f"{('by', '')[which]:<{_BY - 1}}" * several
        words += "".join(f"{column[which]:>{column[2]}}" for column in (*cells, *cells))
        lines.append(words)
    return ["#" + line[1:].rstrip() for line in lines]


def row_line(row: Row, several: bool) -> str:
    """One row. What a contestant cannot do is "-"; what nobody checked is "N/A"."""
    left = (row.size, row.count, row.dtype, row.op, row.root)
    words = "".join(f"{value:>{width}}" for value, (*_, width) in zip(left, _LEFT, strict=True))
    words += f" {row.by:<{_BY - 1}}" * several
    return (words + "".join(_cell(row.cells.get(place), row.size, several) for place in PLACES)).rstrip()


def fit_lines(fits: Iterable[Fitted]) -> list[str]:
    """A line for each."""
    lines = []
    for each in fits:
        latency, slope = each.line
        bandwidth = f"{_number(1e-9 / slope):>9} GB/s" if slope else "no limit seen"
        name = f"{each.dtype} {each.by} {PLACES[each.place]}"
        lines.append(f"#   {name:<48} latency {_number(latency * 1e6):>9} us   bandwidth {bandwidth}")
    return ["# t = a + b*size, sum of ((a + b*size - t)/t)^2 least: latency a, bandwidth 1/b", *lines] if lines else []


def place_text(backend: str, ranks: int, nodes: int) -> str:
    """`place_text("mpi", 4, 1) == "4 ranks on 1 node, backend mpi"`."""
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, backend {backend}"


def opening(kind: Kind, ranks: int, where: str, several: bool) -> list[str]:
    """The lines above a collective's table: what its columns mean."""
    ping = ", half of a round trip between ranks 0 and 1, 2 and 3, ..." if kind.trips == 2 else ""
    lines = [f"# {kind.name}: {where}", f"# time: median over rounds of the slowest rank's time of one call{ping}"]
    words = [] if kind.empty else [f"algbw = size/time, busbw = algbw * {kind.factor(ranks):.4g}"]
    if several:
        words.append("ratio: time / that of ours on ordinary arrays, median over rounds")
    return lines + [f"# {'; '.join(words)}"] * bool(words)


def closing(rows: Sequence[Row]) -> list[str]:
    """What the checks found, if they were made."""
    found = [cell.wrong for row in rows for cell in row.cells.values() if cell.wrong is not None]
    return [f"# wrong elements: {sum(found)}"] if found else []


def _cell(cell: Cell | None, size: int, several: bool) -> str:
    if cell is None:
        texts = ["-"] * (len(_CELL) + several)
    else:
        bandwidths = [_number(cell.algbw), _number(cell.busbw)] if size else ["-", "-"]
        texts = [_number(cell.seconds * 1e6), *bandwidths, "N/A" if cell.wrong is None else str(cell.wrong)]
        texts += ["" if cell.ratio is None else f"{cell.ratio:.2f}"] * several
    widths = [width for *_, width in _CELL] + [_RATIO] * several
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def _number(value: float) -> str:
    """Four digits that count, as far as three decimals show them."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"
