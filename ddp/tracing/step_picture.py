"""Draws one step of all ranks: compute, the reduction of each bucket, and waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp._files import atomic_write
from ddp.parallel.step_trace import Step
from ddp.tracing.chrome_trace import TracePart, last_arrivals, step_of_ranks, waits

# Maximum number of ranks that are drawn: more would not be legible.
_RANKS = 6
# Milliseconds in a nanosecond.
_MS = 1e-6
# Heights of a bucket's row, and of the gap between ranks. The compute bar has height 1.
_BUCKET = 0.42
_GAP = 0.9
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


def draw(parts: Sequence[TracePart], number: int, count: int, path: Path) -> None:
    """Writes a PNG of step `number` of the first model. count: the number of steps, for the title

    Raises: ImportError if matplotlib is missing; OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = {part.rank: part.models[0][number] for part in parts}
    last = last_arrivals(step_of_ranks(parts, number))
    late = {rank: waits(step, rank, last) for rank, step in steps.items()}
    shown = shown_ranks(list(steps), [rank for waited in late.values() for _, rank in waited.values()])
    zero = min(begin for step in steps.values() for _, begin, _ in step.phases())
    height = 1 + _GAP + _BUCKET * max(len(step.ready) for step in steps.values())
    # Without pyplot, whose state the user's program may be using.
    figure = Figure(figsize=(12.0, min(16.0, 2.6 + 0.52 * height * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()

    def bar(name: str, begin: float, end: float, middle: float, thick: float) -> None:
        if end > begin:
            extent = ((begin - zero) * _MS, (end - begin) * _MS)
            panel.broken_barh([extent], (middle - thick / 2, thick), label=name, facecolor=_COLORS[name])

    for row, rank in enumerate(shown):
        step = steps[rank]
        top = -row * height
        for name, begin, end in step.phases():
            bar(name, begin, end, top, 1.0)
        for bucket, (ready, times, (_, nbytes)) in enumerate(zip(step.ready, step.times, step.contents, strict=True)):
            middle = top - 0.5 - (bucket + 0.55) * _BUCKET
            panel.plot([(ready - zero) * _MS], [middle], "k|", markersize=7)
            if times is not None:
                begin, end = times
                started, _ = late[rank].get(bucket, (begin, rank))
                exposed = min(max(step.computed, started), end)
                bar("bucket waits for a late rank", begin, started, middle, 0.75 * _BUCKET)
                bar("bucket, hidden behind backward", started, exposed, middle, 0.75 * _BUCKET)
                bar("bucket, exposed", exposed, end, middle, 0.75 * _BUCKET)
                label = f" {bucket}: {nbytes / (1 << 20):.3g} MiB"
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
    """The ranks to draw, at most 6, in rank order. The first rank is always drawn; late ranks are preferred to others.

    late: ranks that buckets waited for
    """
    return sorted(list(dict.fromkeys([ranks[0], *reversed(late), *ranks]))[:_RANKS])


def title(number: int, count: int, steps: Mapping[int, Step]) -> str:
    """The title of the figure. steps: by rank"""
    rank, step = next(iter(steps.items()))
    text = f"Step {number}, typical of {count}: {(step.ended - step.since) * _MS:.1f} ms. "
    text += f"Rank {rank}: waited {(step.ended - step.computed) * _MS:.1f} ms after backward"
    complete = sorted((max(step.ready, default=0), rank) for rank, step in steps.items())
    if len(steps) > 1:
        (previous, _), (last, late) = complete[-2:]
        text += f"\nlast to complete its gradients: rank {late}, {(last - previous) * _MS:.1f} ms after the others"
    return text
