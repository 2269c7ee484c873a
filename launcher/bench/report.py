"""The reports of a run: a table like those of nccl-tests, JSON, and a plot."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.bench.collective_table import Collective, ResultPlace
from launcher.bench.settings import Settings
from launcher.errors import UsageError, plural


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation's result for one collective, size and place.

    size: bytes of the larger buffer; count: elements a rank; op: "none" if the collective takes none
    seconds: of one call, or of one message of send_recv: the median of `rounds`; calls: how many were measured
    algbw, busbw: GB/s (1e9 bytes)
    wrong: the number of wrong elements, None if they were not checked
    ratio: its time divided by that of the first implementation (ours, on ordinary or device arrays), median over
        rounds. None for the first implementation itself, or if the first one does not support the call
    """

    collective: str
    size: int
    count: int
    dtype: str
    op: str
    place: ResultPlace
    by: str
    seconds: float
    algbw: float
    busbw: float
    calls: int
    rounds: tuple[float, ...]
    wrong: int | None = None
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the ranks of one job measured.

    unsupported: a sentence for each thing that an implementation could not do; versions: those of `versions()`
    """

    backend: str
    ranks: int
    nodes: int
    versions: dict[str, str]
    rows: tuple[Row, ...]
    unsupported: tuple[str, ...]

    @property
    def wrong(self) -> int:
        """Number of elements that differ from the correct result."""
        return sum(row.wrong or 0 for row in self.rows)


# The title, unit and width of each column.
_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 10),
    ("redop", "", 6),
    ("place", "", 6),
    ("by", "", 18),
    ("time", "(us)", 10),
    ("algbw", "(GB/s)", 9),
    ("busbw", "(GB/s)", 9),
    ("#wrong", "", 8),
    ("ratio", "", 8),
)


def heading(collective: Collective, ranks: int, nodes: int, backend: str) -> list[str]:
    """The lines above a collective's table: what its columns mean."""
    ping = ", half of a round trip between ranks 0 and 1, 2 and 3, ..." if collective.trips == 2 else ""
    bandwidth = "" if collective.empty else f"algbw = size/time, busbw = algbw * {collective.factor(ranks):.4g}; "
    names, units, _ = zip(*_COLUMNS, strict=True)
    return [
        f"# {collective.name}: {plural(ranks, 'rank')} on {plural(nodes, 'node')}, backend {backend}",
        f"# time: median over rounds of the slowest rank's time of one call{ping}",
        f"# {bandwidth}ratio: time / that of ours on ordinary arrays, median over rounds",
        f"#{_align(names)[1:]}",
        f"#{_align(units)[1:]}",
    ]


def line(row: Row) -> str:
    """One row of the table, with "N/A" as `#wrong` if the result was not checked."""
    bandwidths = [_number(row.algbw), _number(row.busbw)] if row.size else ["-", "-"]
    cells = [row.size, row.count, row.dtype, row.op, row.place, row.by]
    wrong = "N/A" if row.wrong is None else row.wrong
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return _align([*cells, _number(row.seconds * 1e6), *bandwidths, wrong, ratio])


def _align(cells: Sequence[object]) -> str:
    """A row of the table. Widths are fixed, since rows are printed as they are measured."""
    return "".join(f"{cell!s:>{width}}" for cell, (*_, width) in zip(cells, _COLUMNS, strict=True)).rstrip()


def _number(value: float) -> str:
    """The number with three decimals if it is below 10, two if it is below 100, else one."""
    decimals = 1 + (value < 100) + (value < 10)
    return f"{value:.{decimals}f}"


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """How many times larger a is than b: the median of the rounds' ratios, since in a round both met the same noise."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def versions() -> dict[str, str]:
    """Versions of Python and ddp-runtime, and of NumPy, mpi4py, PyTorch and CuPy if this process has loaded them."""
    always = {"python": platform.python_version(), "ddp-runtime": importlib.metadata.version("ddp-runtime")}
    return always | {
        name: str(sys.modules[name].__version__) for name in ("numpy", "mpi4py", "torch", "cupy") if name in sys.modules
    }


def save(path: str, settings: Settings, outcome: Outcome) -> None:
    """Writes a run as JSON. Raises: UsageError if the file cannot be written."""
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
        "settings": dataclasses.asdict(settings),
        **dataclasses.asdict(outcome),
    }
    try:
        with open(path, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def check_plot(path: str) -> None:
    """Checks the suffix of a plot's path. Raises: UsageError if matplotlib cannot write files with this suffix."""
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = FigureCanvasBase.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in suffixes:
        raise UsageError(f"--plot {path} should end as matplotlib's files do: .{', .'.join(sorted(suffixes))}")


def save_plot(path: str, outcome: Outcome) -> None:
    """Draws bus bandwidth against size: a panel for each collective, a line for each implementation, dtype and place.

    Raises: UsageError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes to a file, and needs no display
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.collective for row in outcome.rows if row.size))
    columns = max(1, min(3, len(names)))
    shape = (math.ceil(len(names) / columns) or 1, columns)
    figure, axes = pyplot.subplots(*shape, figsize=(6.0 * columns, 4.5 * shape[0]), squeeze=False, layout="constrained")
    for panel, name in zip(axes.flat, names, strict=False):
        rows = [row for row in outcome.rows if row.collective == name]
        for key in dict.fromkeys((row.by, row.dtype, row.place) for row in rows):
            points = [row for row in rows if (row.by, row.dtype, row.place) == key]
            # A rank that is alone has no bus bandwidth.
            panel.plot(
                [row.size for row in points], [row.busbw or row.algbw for row in points], "o-", label=", ".join(key)
            )
        panel.set(title=name, xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)", yscale="log")
        panel.set_xscale("log", base=2)
        panel.legend(fontsize=8)
    figure.suptitle(f"{plural(outcome.ranks, 'rank')}, backend {outcome.backend}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise UsageError(f"{path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
