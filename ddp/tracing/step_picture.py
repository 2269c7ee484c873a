"""A picture of one step of all ranks: what each computed, which bucket travelled meanwhile, and what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp._files import atomic_write
from ddp.parallel.stats import covered
from ddp.parallel.step_trace import Step
from ddp.tracing.trace_parts import TracePart, common_steps, last_arrivals, phases

_RANKS = 6  # as many as are legible
_MS = 1e-6
_BUCKET, _GAP = 0.42, 0.9  # heights; that of the compute bar is 1
_COLORS = {
    "forward": "#4c78a8",
    "loss": "#9ecae9",
    "backward": "#f2a541",
    "other: data, optimizer, logging": "#d9d9d9",
    "wait for communication": "#d62728",
    "bucket, hidden behind backward": "#54a24b",
    "bucket, exposed": "#e45756",
    "bucket waits for a late rank": "#eeeeee",
}


def draw(parts: Sequence[TracePart], number: int, path: Path) -> None:
    """Writes a PNG of that step of the first model, which all parts have, as they have the one before.

    Raises: ImportError if matplotlib is missing; OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    common = common_steps(parts)
    steps, befores = common[number], common[number - 1]
    last = last_arrivals(steps, parts[0].size)
    shown = shown_ranks(len(parts), [rank for _, rank in last])
    zero = min(before.ended for before in befores)
    height = 1 + _GAP + _BUCKET * max(len(steps[place].ready) for place in shown)
    # A figure of its own, not pyplot's: the program that we are part of may be drawing, too.
    figure = Figure(figsize=(12.0, min(16.0, 2.6 + 0.52 * height * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()

    def bar(name: str, begin: int, end: int, middle: float, thick: float) -> None:
        if end > begin:
            where = ((begin - zero) * _MS, (end - begin) * _MS)
            panel.broken_barh([where], (middle - thick / 2, thick), label=name, facecolor=_COLORS[name])

    for row, place in enumerate(shown):
        step, top = steps[place], -row * height
        for phase in phases(step, befores[place].ended):
            bar(*phase, top, 1.0)
        for bucket, (ready, times) in enumerate(zip(step.ready, step.times, strict=True)):
            middle = top - 0.5 - (bucket + 0.55) * _BUCKET
            panel.plot([(ready - zero) * _MS], [middle], "k|", markersize=7)
            if times is not None:
                launched, done = times
                met = min(max(last[bucket][0] if last else launched, launched), done)
                split = min(max(step.computed, met), done)
                bar("bucket waits for a late rank", launched, met, middle, 0.75 * _BUCKET)
                bar("bucket, hidden behind backward", met, split, middle, 0.75 * _BUCKET)
                bar("bucket, exposed", split, done, middle, 0.75 * _BUCKET)
                label = f"{bucket}: {size_text(step.contents.nbytes[bucket])}"
                panel.text((done - zero) * _MS, middle, f" {label}", va="center", fontsize=7)
    panel.set_yticks([-row * height for row in range(len(shown))], [f"rank {parts[place].rank}" for place in shown])
    panel.set_xlabel("ms since the step before ended (host times); | a bucket is ready")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(title(number, len(common), steps, befores), loc="left", fontsize=11)
    handles, labels = panel.get_legend_handles_labels()
    used = dict(zip(labels, handles, strict=True))
    figure.legend(used.values(), used.keys(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=130, format="png")


def shown_ranks(size: int, late: Sequence[int]) -> list[int]:
    """The ranks that are drawn: all, or of many the first, those that buckets waited for, and the next ones."""
    return sorted(list(dict.fromkeys([0, *reversed(late), *range(size)]))[:_RANKS])


def title(number: int, count: int, steps: Sequence[Step], befores: Sequence[Step]) -> str:
    """What the picture shows, in numbers. count: the steps from which it was chosen"""
    first = steps[0]
    length, waited = (first.ended - befores[0].ended) * _MS, (first.ended - first.computed) * _MS
    text = f"Step {number}, typical of {count}: {length:.1f} ms. Rank 0: waited {waited:.1f} ms after backward"
    spans = [times for times in first.times if times is not None]
    if spans:
        wire, hidden = covered(spans), covered([(begin, min(end, first.computed)) for begin, end in spans])
        text += f"; {100 * hidden / max(wire, 1):.0f} % of {wire * _MS:.1f} ms communication hidden behind it"
    complete = sorted((max(step.ready, default=step.begun), rank) for rank, step in enumerate(steps))
    if len(steps) > 1:
        (before, _), (at, late) = complete[-2:]
        text += f"\nlast to complete its gradients: rank {late}, {(at - before) * _MS:.1f} ms after the others"
    return text


def size_text(nbytes: int) -> str:
    """`size_text(1 << 20) == "1.0 MiB"`"""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
