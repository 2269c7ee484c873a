"""What is printed and kept of a run: rows and columns as nccl-tests has them, a fitted line, JSON, a picture."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from launcher.bench.collective_table import PLACES, Kind, Place
from launcher.bench.settings import Settings
from launcher.errors import UsageError


class Line(NamedTuple):
    """latency: a, in seconds; slope: b, in seconds a byte, 0 if time does not grow with size."""

    latency: float
    slope: float


def fit(sizes: Sequence[int], times: Sequence[float]) -> Line | None:
    """The line through these times (seconds, > 0) of these sizes (bytes); None unless two sizes differ."""
    if len(set(sizes)) < 2:
        return None
    weights = [1 / (t * t) for t in times]
    w = sum(weights)
    ws = sum(weight * s for weight, s in zip(weights, sizes, strict=True))
    wss = sum(weight * s * s for weight, s in zip(weights, sizes, strict=True))
    wt = sum(1 / t for t in times)
    wst = sum(s / t for s, t in zip(sizes, times, strict=True))
    slope = (w * wst - ws * wt) / (w * wss - ws * ws)
    if slope <= 0:
        return Line(wt / w, 0.0)
    latency = (wt - slope * ws) / w
    return Line(latency, slope) if latency >= 0 else Line(0.0, wst / wss)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One implementation's result for one size in one place.

    seconds: of one call; algbw, busbw: GB/s; wrong: elements, None if unchecked; calls: measured; rounds: seconds
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
    """One implementation's results for one size. size: bytes; count: elements; without op "none", without root -1."""

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
    """An implementation's latency and bandwidth for one collective."""

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
    """The lines above a table. several: more than one implementation, so rows name it and its ratio."""
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
    """One row. What an implementation cannot do is "-"; what was not checked is "N/A"."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one job, the ranks of one backend, brought.

    unsupported: what an implementation could not do, a sentence each; versions: of what it ran on
    """

    backend: str
    ranks: int
    nodes: int
    versions: dict[str, str]
    rows: tuple[Row, ...]
    fits: tuple[Fitted, ...]
    unsupported: tuple[str, ...]

    @property
    def wrong(self) -> int:
        """Elements that were not what they must be."""
        return sum(cell.wrong or 0 for row in self.rows for cell in row.cells.values())

    def encode(self) -> dict[str, Any]:
        """As JSON's types. latency_us and bandwidth_gbs (1e9 bytes a second) are the fitted ones."""
        document = dataclasses.asdict(self)
        for fitted, each in zip(document["fits"], self.fits, strict=True):
            latency, slope = each.line
            fitted |= {"latency_us": latency * 1e6, "bandwidth_gbs": 1e-9 / slope if slope else None}
        return document


def report(settings: Settings, outcomes: Sequence[Outcome], now: datetime.datetime) -> dict[str, Any]:
    """The whole of a run."""
    return {
        "date": now.isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(settings),
        "machine": machine(),
        "jobs": [outcome.encode() for outcome in outcomes],
    }


def machine() -> dict[str, Any]:
    """What this machine is."""
    return {
        "host": platform.node(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def cpu() -> str:
    """The processor's name, as the kernel knows it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:  # not on this system
        pass
    return platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of each library of ours that this process has loaded."""
    found = {"python": platform.python_version()}
    for name in ("ddp-runtime", "numpy", "mpi4py", "torch", "cupy"):
        if name == "ddp-runtime" or name in sys.modules:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = str(getattr(sys.modules.get(name), "__version__", "not installed"))
    return found


def save(path: str, document: dict[str, Any]) -> None:
    """Writes it. Raises: UsageError if the file cannot be written after all."""
    try:
        # Nonblocking: a named pipe that has no reader is an error, not a wait.
        with open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)) as file:
            os.set_blocking(file.fileno(), True)
            json.dump(document, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


# -- the picture: bus bandwidth against size, a panel for each collective, a line for each implementation


def save_plot(path: str, outcomes: Sequence[Outcome], title: str) -> bool:
    """Writes a PNG; False if nothing that was measured has a size.

    Raises: UsageError if the file cannot be written after all.
    """
    rows = [row for outcome in outcomes for row in outcome.rows if row.size]
    if not rows:
        return False
    import matplotlib

    matplotlib.use("Agg")  # a file, wherever this runs
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.collective for row in rows))
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    # A single panel is as wide as a page's column; many share a page.
    shape = (9.0, 5.5) if len(names) == 1 else (5.2 * columns, 3.8 * lines + 1.2)
    figure, axes = pyplot.subplots(lines, columns, figsize=shape, squeeze=False, layout="constrained")
    styles = Styles(rows)
    for panel, name in zip(axes.flat, names, strict=False):
        _draw(panel, name, [row for row in rows if row.collective == name], styles)
    for panel in axes.flat[len(names) :]:
        panel.set_visible(False)
    figure.suptitle(title)
    handles = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
    ordered = [handles[label] for label in styles.labels() if label in handles]
    figure.legend(handles=ordered, loc="outside lower center", ncols=columns + 1, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)
    return True


class Styles:
    """Which line is whose: a colour for each implementation, a dash for each place, a marker for each dtype."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._by = list(dict.fromkeys(row.by for row in rows))
        self._dtypes = list(dict.fromkeys(row.dtype for row in rows))

    def of(self, by: str, dtype: str, place: str) -> dict[str, Any]:
        """Arguments of `plot`."""
        dtypes = f" {dtype}" if len(self._dtypes) > 1 else ""
        return {
            "color": f"C{self._by.index(by)}",
            "marker": "osv^D*PX"[self._dtypes.index(dtype) % 8],
            "markersize": 3.5,
            "linestyle": "--" if place == "out" else "-",
            "label": f"{by}{dtypes}, {'out of place' if place == 'out' else 'in place'}",
        }

    def labels(self) -> list[str]:
        """All that there can be, those of one implementation together."""
        return [self.of(by, dtype, place)["label"] for by in self._by for dtype in self._dtypes for place in PLACES]


def _draw(panel: Any, name: str, rows: Sequence[Row], styles: Styles) -> None:
    lines = dict.fromkeys((row.by, row.dtype, place) for row in rows for place in PLACES if place in row.cells)
    for by, dtype, place in lines:
        mine = [row for row in rows if (row.by, row.dtype) == (by, dtype) and place in row.cells]
        # The bus of a rank that is alone carries nothing.
        bandwidths = [row.cells[place].busbw or row.cells[place].algbw for row in mine]
        panel.plot([row.size for row in mine], bandwidths, **styles.of(by, dtype, place))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(lambda value, _: size_text(value))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_title(name)
    panel.set_xlabel("size (bytes)")
    panel.set_ylabel("bus bandwidth (GB/s)")
    panel.grid(True, which="major", alpha=0.3)


def size_text(value: float) -> str:
    """`size_text(65536) == "64K"`: as sizes are written on the command line."""
    for unit, text in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if value >= unit:
            return f"{value / unit:g}{text}"
    return f"{value:g}"
