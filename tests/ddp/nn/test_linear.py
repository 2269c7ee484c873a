"""Layers against PyTorch: the same weights give the same values and gradients; and how wrong use is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError
from tests.ddp.nn.against_torch import check_layer, check_refusals

pytest.importorskip("torch", reason="PyTorch is the oracle here")

LAYERS: list[tuple[Any, ...]] = [
    ("Linear", (4, 3), {}, (5, 4)),
    ("Linear", (4, 3), {"bias": False}, (2, 5, 4)),
    ("Bilinear", (4, 3, 2), {}, (5, 4), (5, 3)),
    ("Flatten", (), {}, (2, 3, 4)),
    ("Flatten", (0, 1), {}, (2, 3, 4)),
]


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_agrees_with_pytorch(case: Any) -> None:
    check_layer(*case)


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
    assert_allclose(models[0].weight.array, models[1].weight.array, rtol=1e-6)


def test_refusals() -> None:
    check_refusals(
        {
            ShapeError: {
                r"linear: input \(4, 5\) and weight \(2, 3\)": lambda: nn.Linear(3, 2)(ddp.ones(4, 5)),
                r"expected \(2,\)": lambda: nn.functional.linear(ddp.ones(3), ddp.ones(2, 3), ddp.ones(3)),
                r"inputs \(4, 2\) and \(4, 3\)": lambda: nn.Bilinear(2, 2, 3)(ddp.ones(4, 2), ddp.ones(4, 3)),
            },
            DtypeError: {"float64, float32, float32": lambda: nn.Linear(3, 2)(ddp.ones(3, dtype=ddp.float64))},
            ArgumentError: {"in1_features is positive": lambda: nn.Bilinear(0, 2, 3)},
        }
    )
