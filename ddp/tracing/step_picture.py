"""A picture of one step of all ranks: what each computed, which bucket travelled meanwhile, and what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp._files import atomic_write
from ddp.parallel.stats import covered
from ddp.parallel.step_trace import BUCKETS, COMPUTE, ROWS, Event
from ddp.tracing.trace_parts import extent

_RANKS = 6  # as many as are legible
_MS = 1e-3  # milliseconds in a microsecond
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


def draw(events: Sequence[Event], number: int, count: int, path: Path) -> None:
    """Writes a PNG of step `number` of the first model. events: all of the trace; count: steps that it is typical of

    Raises: ImportError if matplotlib is missing; OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps: dict[int, list[Event]] = {}  # by rank
    for event in events:
        if event["ph"] != "M" and event["tid"] < ROWS and event["args"]["step"] == number:
            steps.setdefault(event["pid"], []).append(event)
    late = [event["args"]["rank"] for mine in steps.values() for event in mine if "rank" in event["args"]]
    shown = shown_ranks(list(steps), late)
    zero = min(extent(mine)[0] for mine in steps.values())
    height = 1 + _GAP + _BUCKET * max(max(0, event["tid"] - BUCKETS + 1) for mine in steps.values() for event in mine)
    # A figure of its own, not pyplot's: the program that we are part of may be drawing, too.
    figure = Figure(figsize=(12.0, min(16.0, 2.6 + 0.52 * height * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()

    def bar(name: str, begin: float, end: float, middle: float, thick: float) -> None:
        if end > begin:
            where = ((begin - zero) * _MS, (end - begin) * _MS)
            panel.broken_barh([where], (middle - thick / 2, thick), label=name, facecolor=_COLORS[name])

    for row, rank in enumerate(shown):
        top, computed = -row * height, computed_at(steps[rank])
        arrived: dict[int, float] = {
            e["tid"]: e["ts"] + e["dur"] for e in steps[rank] if "rank" in e["args"]
        }  # the last rank
        for event in steps[rank]:
            begin: float = event["ts"]
            end: float = begin + event.get("dur", 0)
            middle = top - 0.5 - (event["tid"] - BUCKETS + 0.55) * _BUCKET
            if event["tid"] == COMPUTE:
                bar(event["name"], begin, end, top, 1.0)
            elif event["ph"] == "i":
                panel.plot([(begin - zero) * _MS], [middle], "k|", markersize=7)
            elif "MiB" in event["args"]:
                travels = arrived.get(event["tid"], begin)
                split = min(max(computed, travels), end)
                bar("bucket waits for a late rank", begin, travels, middle, 0.75 * _BUCKET)
                bar("bucket, hidden behind backward", travels, split, middle, 0.75 * _BUCKET)
                bar("bucket, exposed", split, end, middle, 0.75 * _BUCKET)
                label = f" {event['tid'] - BUCKETS}: {event['args']['MiB']:.3g} MiB"
                panel.text((end - zero) * _MS, middle, label, va="center", fontsize=7)
    panel.set_yticks([-row * height for row in range(len(shown))], [f"rank {rank}" for rank in shown])
    panel.set_xlabel("ms since the step before ended (host times); | a bucket is ready")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(title(number, count, steps), loc="left", fontsize=11)
    handles, labels = panel.get_legend_handles_labels()
    used = dict(zip(labels, handles, strict=True))
    figure.legend(used.values(), used.keys(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=130, format="png")


def shown_ranks(ranks: Sequence[int], late: Sequence[int]) -> list[int]:
    """The ranks that are drawn: all, or of many the first, those that buckets waited for, and the next ones."""
    return sorted(list(dict.fromkeys([ranks[0], *reversed(late), *ranks]))[:_RANKS])


def computed_at(events: Sequence[Event]) -> float:
    """When backward had computed everything."""
    return max((event["ts"] + event["dur"] for event in events if event["name"] == "backward"), default=0.0)


def title(number: int, count: int, steps: dict[int, list[Event]]) -> str:
    """What the picture shows, in numbers. steps: the events of each rank"""
    rank, mine = next(iter(steps.items()))
    (begin, end), computed = extent(mine), computed_at(mine)
    text = f"Step {number}, typical of {count}: {(end - begin) * _MS:.1f} ms. "
    text += f"Rank {rank}: waited {(end - computed) * _MS:.1f} ms after backward"
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X" and "MiB" in e["args"]]
    if spans:
        wire, hidden = covered(spans), covered([(begin, min(end, computed)) for begin, end in spans])
        text += f"; {100 * hidden / max(wire, 1):.0f} % of {wire * _MS:.1f} ms communication hidden behind it"
    ready = {rank: [e["ts"] for e in events if e["ph"] == "i"] for rank, events in steps.items()}
    complete = sorted((max(times, default=0.0), rank) for rank, times in ready.items())
    if len(steps) > 1:
        (before, _), (at, late) = complete[-2:]
        text += f"\nlast to complete its gradients: rank {late}, {(at - before) * _MS:.1f} ms after the others"
    return text
