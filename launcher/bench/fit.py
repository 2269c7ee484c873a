"""Latency and bandwidth out of times: the straight line nearest to them, measured in percent.

The model is time = a + b*size. Times span six decades, so it is their relative errors whose squares are made least:

    sum of ((a + b*s - t) / t)^2 -> min.  With weights w = 1/t^2, and S(...) for the sum over all sizes s and times t:
    b = (S(w) S(wst) - S(ws) S(wt)) / (S(w) S(wss) - S(ws)^2),   a = (S(wt) - b S(ws)) / S(w)

and where that makes one of them negative, it is 0 and the other is fitted alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
