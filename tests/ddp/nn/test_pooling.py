"""Pooling layers beside PyTorch's: values, gradients, indices, texts; ties, nan and infinities; what is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn import functional
from tests.ddp.nn.against_torch import agree, check_layer, check_refusals, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")

LAYERS: list[tuple[Any, ...]] = [
    ("MaxPool1d", (3, 2), {"padding": 1, "dilation": 2, "ceil_mode": True}, (3, 9)),
    ("MaxPool2d", (3,), {"stride": 2, "padding": 1}, (2, 3, 6, 5)),
    ("MaxPool2d", ((3, 1),), {"stride": (2, 1), "padding": (1, 0), "return_indices": True}, (2, 3, 9, 1)),
    ("MaxPool2d", ((3, 2),), {"stride": (2, 1), "padding": 1, "ceil_mode": True}, (2, 3, 6, 5)),
    ("AvgPool1d", (3, 2, 1), {"ceil_mode": True, "count_include_pad": False}, (3, 8)),
    ("AvgPool2d", ((3, 2), 2), {"padding": 1, "ceil_mode": True, "divisor_override": 5}, (3, 6, 5)),
    ("MaxPool3d", ((2, 3, 2), (1, 2, 1)), {"padding": 1, "dilation": (2, 1, 1), "ceil_mode": True}, (3, 5, 6, 4)),
    ("AdaptiveAvgPool3d", ((None, 2, 1),), {}, (2, 3, 4, 5, 6)),
    ("AdaptiveAvgPool1d", (3,), {}, (2, 3, 7)),
    ("AdaptiveAvgPool2d", ((None, 2),), {}, (3, 6, 5)),
]


@pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS)
def test_agrees_with_pytorch(name: str, args: Any, options: Any, shape: Any) -> None:
    check_layer(name, args, options, shape)


AWKWARD = {
    "ties": np.arange(64).reshape(1, 1, 8, 8) // 5 % 3,
    "zeros": np.zeros((1, 1, 8, 8)),
    "nan": np.where(np.arange(64) % 7 == 0, np.nan, np.arange(64) % 5).reshape(1, 1, 8, 8),
    "all nan": np.full((1, 1, 8, 8), np.nan),
    "lowest": np.full((1, 1, 8, 8), -np.inf),
    "infinities": np.where(np.arange(64) % 6 == 0, np.inf, -np.inf).reshape(1, 1, 8, 8),
}


@pytest.mark.parametrize("how", [(2,), (3, 1), (3, 2, 1), (2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", AWKWARD)
def test_the_gradient_goes_where_pytorch_has_it_go(kind: str, how: Any) -> None:
    for indices in (False, True):
        pair = [functools.partial(t.nn.functional.max_pool2d, return_indices=indices) for t in (ddp, torch)]
        agree(*(lambda x, f=f: f(x, *how) for f in pair), AWKWARD[kind].astype(np.float32), rtol=1e-6)


def test_integers_have_maxima_and_no_means() -> None:
    x = ddp.arange(16).reshape(1, 1, 4, 4)
    assert functional.max_pool2d(x, 2).tolist() == [[[[5, 7], [13, 15]]]]
    assert functional.max_pool2d(-x, 3, 2, 1).tolist() == [[[[0, -1], [-4, -5]]]]
    for mean in (functional.avg_pool2d, functional.adaptive_avg_pool2d):
        with pytest.raises(DtypeError, match="int64"):
            mean(x, 2)


WRONG: dict[type[Exception], Any] = {
    ShapeError: {
        r"input \(2, 3\): expected \(N, C, H, W\) or": lambda f, z: f.max_pool2d(z(2, 3), 2),
        r"expected \(N, C, L\) or": lambda f, z: f.max_pool1d(z(2, 3, 4, 4), 2),
        r"kernel \(5, 5\) .* does not fit": lambda f, z: f.max_pool2d(z(2, 3, 4, 4), 5),
    },
    ArgumentError: {
        "more than half": lambda f, z: f.max_pool2d(z(2, 3, 4, 4), 2, padding=2),
        "too small": lambda f, z: f.avg_pool2d(z(2, 3, 4, 4), 2, 0),
    },
}


def test_refusals() -> None:
    check_refusals(WRONG, functional, ddp.zeros)
