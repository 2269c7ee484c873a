"""Normalisations: of rows, of channels, by a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw, draws


def functional(name: str, *how: Any, **more: Any) -> Callable[..., Any]:
    return lambda t, *inputs: getattr(t.nn.functional, name)(inputs[0], *how, *inputs[1:], **more)


def far(x: Any, *parameters: Any) -> tuple[Any, ...]:
    """Numbers whose mean is far from zero."""
    return (x + 5, *parameters)


def rows() -> Iterator[Case]:
    for op, count in (("layer_norm", 2), ("rms_norm", 1)):
        wb = ((4,), (4,))[:count]
        run = functional(op, (4,))
        yield Case(op, "affine", run, draws((2, 3, 4), *wb))
        yield Case(op, "plain", run, draws((3, 4)))
        yield Case(op, "two axes", functional(op, (3, 4)), draws((2, 3, 4), *[(3, 4)] * count))
        yield Case(op, "eps", functional(op, (4,), eps=0.5), draws((3, 4)))
        yield Case(op, "empty", run, draws((0, 4), *wb))
    yield Case("layer_norm", "far from zero", functional("layer_norm", (4,)), far(*draws((3, 4), (4,))))
    bias = lambda t, x, b: t.nn.functional.layer_norm(x, (4,), None, b)  # noqa: E731
    yield Case("layer_norm", "bias", bias, draws((3, 4), (4,)))


def channels() -> Iterator[Case]:
    def batch(training: bool) -> Callable[..., Any]:
        def run(t: Any, x: Any, *wb: Any) -> Any:
            mean = t.zeros(3, dtype=x.dtype) + 0.3
            var = t.ones(3, dtype=x.dtype) + 0.5
            return t.nn.functional.batch_norm(x, mean, var, *wb, training=training)

        return run

    wb = (3,), (3,)
    for op, training in (("batch_norm", True), ("channel_affine", False)):
        run = batch(training)
        for shape in ((5, 3), (2, 3, 4), (2, 3, 4, 2), (0, 3, 4)):
            yield Case(op, f"{'empty ' * (0 in shape)}{shape}", run, draws(shape, *wb))
        yield Case(op, "plain", run, draws((2, 3, 4)))
        yield Case(op, "transposed", run, (draw(1, 4, 3).transpose(0, 2, 1), *draws(*wb)))
        yield Case(op, "far from zero", run, far(*draws((2, 3, 4), *wb)))
    wb = (6,), (6,)
    for groups in (1, 2, 6):
        yield Case("group_norm", f"{groups} groups", functional("group_norm", groups), draws((2, 6, 3, 2), *wb))
    run = functional("group_norm", 2)
    yield Case("group_norm", "plain", run, draws((2, 6, 3)))
    yield Case("group_norm", "empty", run, draws((0, 6, 3), *wb))
    yield Case("group_norm", "far from zero", run, far(*draws((2, 6, 3), *wb)))
    instance = functional("instance_norm", None, None)
    yield Case("group_norm", "instances", instance, draws((2, 6, 3, 2), *wb))


def by_norm() -> Iterator[Case]:
    for p in (1, 2, 3.5, math.inf):
        yield Case("normalize", f"p={p}", functional("normalize", p), draws((3, 4)))
    for label, shape, options in [
        ("dim", (3, 2, 4), {"dim": 0}),
        ("below eps", (3, 4), {"eps": 100.0}),
        ("0-d", (), {"dim": 0}),
        ("empty", (0, 3), {}),
    ]:
        yield Case("normalize", label, functional("normalize", **options), draws(shape))


CASES = [*rows(), *channels(), *by_norm()]
