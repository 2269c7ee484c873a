"""Recurrent layers over sequences, forwards and in both directions, with and without biases."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import ddp
from ddp.nn.recurrent import GATES, _run_layer
from tests.ddp.cases.table import Case, draw


def run(mode: str, both: bool = False, bias: bool = True, only: str = "") -> Callable[..., Any]:
    """fn(t, x, h, [c,] weights of each direction): the results side by side, or one of them."""
    states = 2 if mode == "LSTM" else 1

    def fn(t: Any, x: Any, *rest: Any) -> Any:
        first, weights = list(rest[:states]), list(rest[states:])
        directions = 2 if both else 1
        count = len(weights) // directions
        if t.__name__ == "torch":
            function = getattr(t, mode.lower())
            with warnings.catch_warnings():  # of a slower way for projections
                warnings.simplefilter("ignore")
                out = function(x, first if states == 2 else first[0], weights, bias, 1, 0.0, False, both, False)
        else:
            parts = []
            for d in range(directions):
                own = weights[d * count : (d + 1) * count]
                own = [*own[:2], *(own[2:4] if bias else (None, None)), own[-1] if count % 2 else None]
                parts.append(_run_layer(mode, x, tuple(each[d] for each in first), own, d == 1))
            out = (
                ddp.cat([p[0] for p in parts], dim=2),
                *(ddp.stack(last) for last in zip(*(p[1:] for p in parts), strict=True)),
            )
        if only:
            return out[("out", "h", "c").index(only)]
        return t.cat([each.reshape(-1) * (i + 1) for i, each in enumerate(out)])

    return fn


def arrays(
    mode: str, steps: int = 3, batch: int = 2, both: bool = False, bias: bool = True, proj: int = 0
) -> tuple[np.ndarray[Any, Any], ...]:
    size = 4
    into = 3
    directions = 2 if both else 1
    wide = GATES[mode] * size
    out = proj or size
    shapes: list[tuple[int, ...]] = [(directions, batch, out)]
    if mode == "LSTM":
        shapes.append((directions, batch, size))
    for _ in range(directions):
        shapes += [(wide, into), (wide, out), *([(wide,), (wide,)] if bias else []), *([(proj, size)] if proj else [])]
    drawn = (draw(*shape, seed=i + 1, low=-0.9, high=0.9) for i, shape in enumerate(shapes))
    return draw(steps, batch, into), *drawn


def recurrents() -> Iterator[Case]:
    for mode, op in {"RNN_TANH": "rnn", "RNN_RELU": "rnn", "GRU": "gru", "LSTM": "lstm"}.items():
        yield Case(op, mode, run(mode), arrays(mode))
        yield Case(op, f"{mode} both ways", run(mode, both=True), arrays(mode, both=True))
        yield Case(op, f"{mode} without bias", run(mode, bias=False), arrays(mode, bias=False))
        yield Case(op, f"{mode} one step", run(mode), arrays(mode, steps=1))
        yield Case(op, f"{mode} output alone", run(mode, only="out"), arrays(mode))
        yield Case(op, f"{mode} empty batch", run(mode), arrays(mode, batch=0))
    yield Case("lstm", "projected", run("LSTM", both=True), arrays("LSTM", both=True, proj=2))
    yield Case("lstm", "cell state alone", run("LSTM", only="c"), arrays("LSTM"))


CASES = list(recurrents())
