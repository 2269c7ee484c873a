"""A period in one line, to be printed after each epoch."""

from __future__ import annotations

from ddp.parallel.timeline.stats import Spread, Stats


def one_line(stats: Stats) -> str:
    """`200 steps of 45.2 ms: forward 12.1, backward 24.0, exposed communication 3.1 (of 18.4, 83 % hidden), ...`"""
    if stats.steps == 0:
        return "no step"
    head = f"{stats.steps} step{'' if stats.steps == 1 else 's'}"
    if stats.step is not None:
        head += f" of {stats.step.mean:.1f} ms"
    parts = [f"{name} {spread.mean:.1f}" for name, spread in _computing(stats) if spread is not None]
    if stats.size > 1 and stats.exposed is not None:
        part = f"exposed communication {stats.exposed.mean:.1f}"
        if stats.communication is not None and stats.hidden_share is not None:
            part += f" (of {stats.communication.mean:.1f}, {100 * stats.hidden_share:.0f} % hidden)"
        parts.append(part)
    if stats.other is not None:
        parts.append(f"other {stats.other.mean:.1f}")
    line = f"{head}: {', '.join(parts)} ms"
    return line if stats.size == 1 else f"{line}; {stats.waited_for()}"


def _computing(stats: Stats) -> list[tuple[str, Spread | None]]:
    return [("forward", stats.forward), ("backward", stats.backward)]
