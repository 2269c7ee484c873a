"""Activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddp
from ddp._tensor.base import apply
from ddp.ops import activation
from tests.ddp.cases.table import Case, draw, draws, function, unary

# PyTorch's gradient of hardsigmoid in float64 has a sixth of float32.
ELSEWHERE = {"hardsigmoid"}


def functional(op: str, *args: Any, name: str | None = None, **options: Any) -> Iterator[Case]:
    run = function(name or op, *args, **options)
    label = ", ".join([name or "", *map(str, args), *map(str, options.values())])
    for case in unary(op, low=-4.0, high=4.0, fn=run):
        yield case._replace(label=f"{case.label} {label}")
    yield Case(op, f"wide {label}", run, (draw(50, low=-30.0, high=30.0),))


def gradient(name: str, formula: Callable[[Any, Any], Any]) -> Iterator[Case]:
    def run(t: Any, g: Any, z: Any) -> Any:
        return apply(getattr(activation, name), (g, z)) if isinstance(g, ddp.Tensor) else formula(g, z)

    yield Case(name, "same", run, (draw(3, 4), draw(3, 4, seed=1)))
    yield Case(name, "empty", run, (draw(0, 4), draw(0, 4)))


PLAIN = ["silu", "mish", "softplus", "logsigmoid", "gelu", "hardswish", "softsign"]
CASES = [
    *gradient("sigmoid_gradient", lambda g, z: g * z * (1 - z)),
    *gradient("tanh_gradient", lambda g, z: g * (1 - z * z)),
    *unary("relu"),
    *(case for op in PLAIN for case in functional(op)),
    *functional("softplus", 0.5, 1.0),
    *functional("gelu", approximate="tanh"),
    *functional("elu", 1.7),
    *functional("elu", 0.5, name="celu"),
    *functional("leaky_relu", 1.5),
    *functional("hardtanh", name="relu6"),
    *functional("threshold", 0.1, 7.0),
    *(
        Case(
            "prelu",
            f"{'empty ' * (0 in shape)}{shape}",
            function("prelu"),
            (draw(*shape), draw(*weight, seed=1, low=0.1)),
        )
        for shape, weight in [((3, 4), (1,)), ((2, 3, 2), (3,)), ((0, 3), (3,))]
    ),
    Case("glu", "last", function("glu", -1), draws((3, 4))),
    Case("glu", "empty", function("glu", 1), draws((0, 4))),
]
