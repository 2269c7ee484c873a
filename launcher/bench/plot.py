"""A picture of it: bus bandwidth against size, a panel for each collective, a line for each implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from launcher.bench.collective_table import PLACES
from launcher.bench.report import Outcome, Row
from launcher.errors import UsageError


def save(path: str, outcomes: Sequence[Outcome], title: str) -> bool:
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
