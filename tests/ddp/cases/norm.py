"""Normalisations: of rows, of channels, by a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw


def functional(name: str, *how: Any, **more: Any) -> Callable[..., Any]:
    return lambda t, *inputs: getattr(t.nn.functional, name)(inputs[0], *how, *inputs[1:], **more)


def rows() -> Iterator[Case]:
    for op, parameters in (("layer_norm", 2), ("rms_norm", 1)):
        wb = (draw(4, seed=1), draw(4, seed=2))[:parameters]
        yield Case(op, "affine", functional(op, (4,)), (draw(2, 3, 4), *wb))
        yield Case(op, "plain", functional(op, (4,)), (draw(3, 4),))
        yield Case(
            op, "two axes", functional(op, (3, 4)), (draw(2, 3, 4), *(draw(3, 4, seed=i) for i in range(parameters)))
        )
        yield Case(op, "eps", functional(op, (4,), eps=0.5), (draw(3, 4),))
        yield Case(op, "empty", functional(op, (4,)), (draw(0, 4), *wb))
    yield Case("layer_norm", "far from zero", functional("layer_norm", (4,)), (draw(3, 4) + 5, draw(4, seed=1)))
    bias = lambda t, x, b: t.nn.functional.layer_norm(x, (4,), None, b)  # noqa: E731
    yield Case("layer_norm", "bias", bias, (draw(3, 4), draw(4, seed=1)))


def channels() -> Iterator[Case]:
    def batch(training: bool = True, **more: Any) -> Callable[..., Any]:
        def run(t: Any, x: Any, *wb: Any) -> Any:
            mean = t.zeros(3, dtype=x.dtype) + 0.3
            var = t.ones(3, dtype=x.dtype) + 0.5
            return t.nn.functional.batch_norm(x, mean, var, *wb, training=training, **more)

        return run

    wb = (draw(3, seed=1), draw(3, seed=2))
    for label, shape in (("rows", (5, 3)), ("series", (2, 3, 4)), ("images", (2, 3, 4, 2))):
        yield Case("batch_norm", label, batch(), (draw(*shape), *wb))
        yield Case("channel_affine", label, batch(False), (draw(*shape), *wb))
    for op, training in (("batch_norm", True), ("channel_affine", False)):
        yield Case(op, "plain", batch(training), (draw(2, 3, 4),))
        yield Case(op, "empty", batch(training), (draw(0, 3, 4), *wb))
        yield Case(op, "transposed", batch(training), (draw(1, 4, 3).transpose(0, 2, 1), *wb))
        yield Case(op, "far from zero", batch(training), (draw(2, 3, 4) + 5, *wb))

    wb = (draw(6, seed=1), draw(6, seed=2))
    for groups in (1, 2, 6):
        yield Case("group_norm", f"{groups} groups", functional("group_norm", groups), (draw(2, 6, 3, 2), *wb))
    yield Case("group_norm", "plain", functional("group_norm", 2), (draw(2, 6, 3),))
    yield Case("group_norm", "empty", functional("group_norm", 2), (draw(0, 6, 3), *wb))
    yield Case("group_norm", "far from zero", functional("group_norm", 3), (draw(2, 6, 3) + 5, *wb))
    instance = lambda t, x, *wb: t.nn.functional.instance_norm(x, None, None, *wb)  # noqa: E731
    yield Case("group_norm", "instances", instance, (draw(2, 6, 3, 2), *wb))


def by_norm() -> Iterator[Case]:
    for p in (1, 2, 3.5, math.inf):
        yield Case("normalize", f"p={p}", functional("normalize", p), (draw(3, 4),))
    yield Case("normalize", "dim", functional("normalize", dim=0), (draw(3, 2, 4),))
    yield Case("normalize", "below eps", functional("normalize", eps=100.0), (draw(3, 4),))
    yield Case("normalize", "0-d", functional("normalize", dim=0), (draw(),))
    yield Case("normalize", "empty", functional("normalize"), (draw(0, 3),))


CASES = [*rows(), *channels(), *by_norm()]
