"""A picture of one step: what each rank computed, what was on the wire meanwhile, and what it had to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp._files import atomic_write
from ddp.parallel.stats import covered
from ddp.parallel.step_trace import Step
from ddp.tracing.trace_parts import Arrival, TypicalStep

_RANKS = 6  # as many as are legible
_LANES = 12  # of buckets, under each rank; more share the room that these have
_MS = 1e-6
_COMPUTE, _LANE, _GAP = 1.0, 0.42, 0.9  # heights
_LEGIBLE = 0.07  # of the picture's width: a bar that holds its name
_COLORS = {
    "forward": "#4c78a8",
    "loss": "#9ecae9",
    "backward": "#f2a541",
    "other: data, optimizer, logging": "#d9d9d9",
    "wait for communication": "#d62728",
    "bucket, hidden behind backward": "#54a24b",
    "bucket, exposed": "#e45756",
    "bucket waits for a late rank": "#ffffff",
    "bucket waits for the one before": "#dfe9df",
}
_HATCHED = {"wait for communication": "////", "bucket waits for a late rank": "...."}


def draw(step: TypicalStep, path: Path) -> None:
    """Writes a PNG. Raises: ImportError if matplotlib is missing; OSError if the file cannot be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = shown_ranks(step)
    zero = min(before.ended for before in step.befores)
    end = max(each.ended for each in step.steps) - zero
    buckets = max(len(step.steps[place].ready) for place in shown)
    room = min(_LANES, buckets) * _LANE
    height = _COMPUTE + room + _GAP
    # A figure of its own, not pyplot's: the program that we are part of may be drawing, too.
    figure = Figure(figsize=(12.0, min(16.0, 2.6 + 0.52 * height * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    ticks: list[tuple[float, str]] = []
    for number, place in enumerate(shown):
        top = -number * height
        row = _Row(panel, top, zero, end, room / max(1, buckets))
        row.draw(step.befores[place].ended, step.steps[place], step.last, step.ranks[place])
        ticks += [(top, f"rank {step.ranks[place]}  compute"), (top - (_COMPUTE + room) / 2, "buckets")]
    panel.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(-len(shown) * height + _GAP, _COMPUTE)
    panel.set_xlim(-0.005 * end * _MS, 1.045 * end * _MS)
    panel.set_xlabel("ms since the step before ended (host times)")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.set_title(title(step), loc="left", fontsize=11)
    used = [name for name in _COLORS if name in panel.get_legend_handles_labels()[1]]
    handles: list[Any] = [Patch(label=name, **_style(name)) for name in used]
    handles += panel.plot([], [], "k|", markersize=7, label="bucket ready")
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    with matplotlib.rc_context({"hatch.linewidth": 0.6}), atomic_write(path) as file:
        figure.savefig(file, dpi=130, format="png")


def shown_ranks(step: TypicalStep) -> list[int]:
    """The places in `step.ranks` of those that are drawn: all, or of many the first and those waited for."""
    places = range(len(step.ranks))
    if len(places) <= _RANKS:
        return list(places)
    late = [step.ranks.index(arrival.rank) for arrival in reversed(step.last)]
    return sorted(list(dict.fromkeys([0, *late, *places]))[:_RANKS])


def title(step: TypicalStep) -> str:
    """What the picture shows, in numbers: two lines."""
    first = step.steps[0]
    head = f"Step {step.number}, typical of {step.of}: {step.length * _MS:.1f} ms."
    waited = f"waited {(first.ended - first.computed) * _MS:.1f} ms after backward"
    spans = [times for times in first.times if times is not None]
    if spans:
        wire, hidden = covered(spans), covered([(begin, min(end, first.computed)) for begin, end in spans])
        share = f"{100 * hidden / max(wire, 1):.0f} % of {wire * _MS:.1f} ms communication hidden behind it"
        waited = f"{waited}; {share}"
    lines = [f"{head} Rank {step.ranks[0]}: {waited}"]
    if step.last:
        late = step.last[-1]
        lines.append(f"last to complete its gradients: rank {late.rank}, {late.after * _MS:.1f} ms after the others")
    return "\n".join(lines)


class _Row:
    """One rank. top: the middle of its compute bar; zero, length: the time at the left, and how much is shown, in ns;
    lane: the height that a bucket has"""

    def __init__(self, panel: Any, top: float, zero: int, length: int, lane: float) -> None:
        self._panel = panel
        self._top = top
        self._zero = zero
        self._length = length
        self._lane = lane

    def draw(self, ended: int, step: Step, last: Sequence[Arrival], rank: int) -> None:
        """ended: when this rank's step before did; last: the last rank at each bucket, if that is known"""
        begin, end = step.forward or (step.begun, step.begun)
        begin = max(begin, ended)
        self._bar("other: data, optimizer, logging", ended, begin)
        self._bar("forward", begin, end)
        self._bar("loss", max(end, begin), step.begun)
        self._bar("backward", step.begun, step.computed)
        self._bar("wait for communication", step.computed, step.ended)
        bottom = self._top - _COMPUTE / 2 - self._lane * len(step.ready)
        self._panel.plot(
            [(step.computed - self._zero) * _MS] * 2,
            [self._top + _COMPUTE / 2, bottom],
            "k--",
            linewidth=0.9,
            alpha=0.7,
        )
        free = step.begun
        for bucket, (ready, times) in enumerate(zip(step.ready, step.times, strict=True)):
            lane, thick = self._top - _COMPUTE / 2 - (bucket + 0.55) * self._lane, 0.75 * self._lane
            if times is not None:
                launched, done = times
                met = launched
                if last and last[bucket].rank != rank:
                    met = min(max(last[bucket].at, launched), done)
                moved = min(max(met, free), done)
                split = min(max(step.computed, moved), done)
                self._bar("bucket waits for a late rank", launched, met, lane, thick)
                self._bar("bucket waits for the one before", met, moved, lane, thick)
                self._bar("bucket, hidden behind backward", moved, split, lane, thick)
                self._bar("bucket, exposed", split, done, lane, thick)
                label = f"{bucket}: {size_text(step.contents.nbytes[bucket])}"
                at = ((done - self._zero) * _MS, lane)
                if self._lane > _LANE / 2:
                    self._panel.annotate(label, at, (3, 0), textcoords="offset points", va="center", fontsize=7)
                free = max(free, done)
            self._panel.plot([(ready - self._zero) * _MS], [lane], "k|", markersize=16 * self._lane)

    def _bar(self, name: str, begin: int, end: int, middle: float | None = None, height: float = _COMPUTE) -> None:
        if end > begin:
            at = self._top if middle is None else middle
            where = ((begin - self._zero) * _MS, (end - begin) * _MS)
            self._panel.broken_barh([where], (at - height / 2, height), label=name, **_style(name))
            if middle is None and end - begin > _LEGIBLE * self._length:
                text = f"{name.split()[0].rstrip(':')}\n{where[1]:.1f} ms"
                white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
                self._panel.text(sum(where) - where[1] / 2, at, text, ha="center", va="center", fontsize=8, bbox=white)


def _style(name: str) -> dict[str, Any]:
    edge = {"hatch": _HATCHED[name], "edgecolor": "#555555"} if name in _HATCHED else {"edgecolor": "none"}
    face = "#f7c6c6" if name == "wait for communication" else _COLORS[name]
    return {"facecolor": face, "linewidth": 0.4, **edge}


def size_text(nbytes: int) -> str:
    """`size_text(1 << 20) == "1.0 MiB"`"""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
