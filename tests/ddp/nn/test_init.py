"""Initialisation: the same bounds and moments as PyTorch's, and the exact ones element for element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import init
from tests.ddp.nn.against_torch import check_refusals, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")

RANDOM = [
    ("uniform_", {"a": -1.0, "b": 3.0}),
    ("normal_", {"mean": 2.0, "std": 3.0}),
    ("trunc_normal_", {"mean": 1.0, "std": 0.5, "a": 0.0, "b": 1.5}),
    ("xavier_uniform_", {"gain": 2.0}),
    ("xavier_normal_", {}),
    ("kaiming_uniform_", {"a": math.sqrt(5)}),
    ("kaiming_uniform_", {"mode": "fan_out", "nonlinearity": "relu"}),
    ("kaiming_normal_", {"nonlinearity": "selu"}),
    ("sparse_", {"sparsity": 0.25, "std": 1.0}),
]


@pytest.mark.parametrize(("name", "options"), RANDOM)
def test_distributions_are_pytorchs(name: str, options: Any) -> None:
    ours = ddp.empty(240, 250)
    theirs = torch.empty(240, 250)
    ddp.manual_seed(1)
    torch.manual_seed(1)
    assert getattr(init, name)(ours, **options) is ours
    getattr(torch.nn.init, name)(theirs, **options)
    a, b = np.sort(ours.numpy(), None), np.sort(theirs.numpy(), None)
    # 60 000 draws each: their quantiles agree to a few hundredths of the spread, except in thin tails.
    assert_allclose(a[600:-600:300], b[600:-600:300], atol=0.05 * b.std())
    assert a[0] == pytest.approx(b[0], rel=0.25, abs=0.01)
    assert a[-1] == pytest.approx(b[-1], rel=0.25, abs=0.01)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("eye_", (3, 5), {}),
        ("eye_", (5, 3), {}),
        ("dirac_", (4, 3, 3), {}),
        ("dirac_", (4, 2, 3, 3), {"groups": 2}),
        ("dirac_", (6, 2, 3, 2, 1), {"groups": 3}),
        ("ones_", (2, 3), {}),
        ("zeros_", (2, 3), {}),
        ("constant_", (2, 3), {"val": 0.3}),
    ],
)
def test_exact_ones(name: str, shape: Any, options: Any) -> None:
    ours = ddp.full(shape, 7.0)
    theirs = torch.full(shape, 7.0)
    getattr(init, name)(ours, **options)
    getattr(torch.nn.init, name)(theirs, **options)
    assert_array_equal(ours.numpy(), theirs.numpy())


def test_gains() -> None:
    for name in ("linear", "conv1d", "conv_transpose3d", "sigmoid", "tanh", "relu", "leaky_relu", "selu"):
        assert init.calculate_gain(name) == pytest.approx(torch.nn.init.calculate_gain(name))
    assert init.calculate_gain("leaky_relu", 0.2) == pytest.approx(torch.nn.init.calculate_gain("leaky_relu", 0.2))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (4, 2, 3)])
def test_orthogonal(shape: Any) -> None:
    weight = init.orthogonal_(ddp.empty(shape, dtype=ddp.float64), gain=2.0).numpy().reshape(shape[0], -1)
    product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    assert_allclose(product, 4 * np.eye(len(product)), atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [name for name in init.__all__ if name not in ("calculate_gain", "constant_", "dirac_", "eye_", "ones_", "zeros_")],
)
def test_generators_repeat(name: str) -> None:
    more: Any = (0.5,) if name == "sparse_" else ()
    draws = []
    for seed in (3, 3, 4):
        draws.append(getattr(init, name)(ddp.empty(4, 5), *more, generator=ddp.Generator().manual_seed(seed)).tolist())
    assert draws[0] == draws[1] != draws[2]


REFUSED: dict[type[Exception], Any] = {
    ShapeError: {
        r"shape \(3,\)": lambda: init.xavier_uniform_(ddp.ones(3)),
        "three to five": lambda: init.dirac_(ddp.ones(3, 3)),
    },
    ArgumentError: {
        "2 groups do not divide 3": lambda: init.dirac_(ddp.ones(3, 3, 3), groups=2),
        "std != 0, got .* std=0": lambda: init.trunc_normal_(ddp.ones(3), std=0),
        "a <= b": lambda: init.trunc_normal_(ddp.ones(3), a=1, b=0),
        "'fan_in' or 'fan_out'": lambda: init.kaiming_normal_(ddp.ones(3, 3), mode="fan"),
    },
}


def test_refusals() -> None:
    check_refusals(REFUSED)
