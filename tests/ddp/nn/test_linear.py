"""Layers against PyTorch: the same weights give the same values and gradients; and how wrong use is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError
from tests.ddp.nn.against_torch import check_layer

LAYERS = [
    ("Linear", (4, 3), {}, (5, 4)),
    ("Linear", (4, 3), {"bias": False}, (2, 5, 4)),
    ("Conv2d", (3, 4, 3), {"padding": 1}, (2, 3, 6, 5)),
    ("Conv2d", (4, 6, (2, 3)), {"stride": (2, 1), "dilation": (1, 2), "groups": 2, "bias": False}, (2, 4, 6, 7)),
    ("MaxPool2d", (2,), {}, (2, 3, 6, 5)),
    ("MaxPool2d", (3,), {"stride": 2, "padding": 1}, (2, 3, 6, 5)),
    ("Flatten", (), {}, (2, 3, 4)),
    ("Flatten", (0, 1), {}, (2, 3, 4)),
]


@pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS)
def test_agrees_with_pytorch(name: str, args: Any, options: Any, shape: Any) -> None:
    check_layer(name, args, options, shape)


@pytest.mark.parametrize(("make", "fan_in"), [(lambda: nn.Linear(64, 500), 64), (lambda: nn.Conv2d(16, 300, 3), 144)])
def test_default_initialisation(make: Any, fan_in: int) -> None:
    ddp.manual_seed(0)
    layer = make()
    bound = 1 / np.sqrt(fan_in)
    for p in layer.parameters():
        assert -bound <= p.amin().item() < -0.9 * bound
        assert 0.9 * bound < p.amax().item() <= bound
    # A uniform distribution has the deviation bound / sqrt(3).
    assert layer.weight.array.std() == pytest.approx(bound / np.sqrt(3), rel=0.02)


def test_one_seed_gives_one_model_in_every_dtype() -> None:
    models = []
    for dtype in (ddp.float32, ddp.float64):
        ddp.manual_seed(7)
        models.append(nn.Linear(3, 2, dtype=dtype))
    np.testing.assert_allclose(models[0].weight.array, models[1].weight.array, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda: nn.Linear(3, 2)(ddp.ones(4, 5)), ShapeError, r"linear: input \(4, 5\) and weight \(2, 3\)"),
        (lambda: nn.Linear(3, 2)(ddp.ones(3, dtype=ddp.float64)), DtypeError, "float64, float32, float32"),
        (lambda: nn.functional.linear(ddp.ones(3), ddp.ones(2, 3), ddp.ones(3)), ShapeError, r"expected \(2,\)"),
        (lambda: nn.Conv2d(3, 2, 3)(ddp.ones(1, 4, 5, 5)), ShapeError, "input has 4 channels, weight takes 3"),
        (lambda: nn.Conv2d(3, 2, 3)(ddp.ones(5, 5)), ShapeError, r"expected \(N, C, H, W\)"),
        (lambda: nn.Conv2d(3, 2, 7)(ddp.ones(1, 3, 5, 5)), ShapeError, "does not fit"),
        (lambda: nn.Conv2d(3, 2, 3, stride=0)(ddp.ones(1, 3, 5, 5)), ArgumentError, r"stride=\(0, 0\)"),
        (lambda: nn.Conv2d(3, 2, 3, groups=2), ArgumentError, "groups 2 does not divide 3 and 2"),
        (lambda: nn.Conv2d(3, 2, (1, 2, 3)), ArgumentError, "kernel_size: expected one number or 2"),
        (lambda: nn.functional.conv2d(ddp.ones(1, 1, 3, 3), ddp.ones(2, 1, 3, 3), ddp.ones(3)), ShapeError, "bias"),
        (lambda: nn.MaxPool2d(2, padding=2)(ddp.ones(1, 1, 4, 4)), ArgumentError, "half of kernel"),
        (lambda: nn.MaxPool2d(2)(ddp.ones(4, 4)), ShapeError, "max_pool2d"),
        (lambda: nn.Dropout(1.5), ArgumentError, "1.5"),
        (lambda: nn.functional.dropout(ddp.ones(1), -1), ArgumentError, "-1"),
        (lambda: nn.functional.pad(ddp.ones(2), (1, 1, 1)), ArgumentError, "expected pairs"),
        (lambda: nn.functional.pad(ddp.ones(2), (1, 1), mode="reflect"), ArgumentError, "'reflect'"),
    ],
)
def test_wrong_use(wrong: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        wrong()
