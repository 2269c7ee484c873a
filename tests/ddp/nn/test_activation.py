"""Activation layers against PyTorch: values, gradients, what they print, in place, and how wrong use is answered."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, InplaceError, ShapeError
from ddp.nn import functional as F
from tests.ddp.cases.table import draw
from tests.ddp.nn.against_torch import agree, agree_as_functions, check_refusals, torch, twins

pytest.importorskip("torch", reason="PyTorch is the oracle here")

LAYERS: list[tuple[Any, ...]] = [
    ("ReLU", (), {}),
    ("ReLU6", (), {}),
    ("LeakyReLU", (0.2,), {"inplace": True}),
    ("ELU", (0.7, True), {}),
    ("SELU", (), {}),
    ("CELU", (1.3,), {}),
    ("GELU", (), {}),
    ("GELU", ("tanh",), {}),
    ("SiLU", (), {}),
    ("Mish", (), {}),
    ("Softplus", (2.0, 1.0), {}),
    ("Softsign", (), {}),
    ("Sigmoid", (), {}),
    ("LogSigmoid", (), {}),
    ("Tanh", (), {}),
    ("Hardtanh", (-0.5, 2.0), {"inplace": True}),
    ("Hardswish", (), {}),
    ("Hardsigmoid", (), {}),
    ("Threshold", (0.2, -7.0, True), {}),
    ("PReLU", (4,), {"init": 0.1}),
    ("GLU", (1,), {}),
    ("Softmax", (1,), {}),
    ("LogSoftmax", (-1,), {}),
    ("Softmin", (0,), {}),
    ("Dropout", (0.0, True), {}),
    ("Dropout1d", (0.0,), {}),
    ("Dropout2d", (0.0,), {"inplace": True}),
]


@pytest.mark.filterwarnings("ignore:dropout2d:UserWarning")  # PyTorch's, of three dimensions
@pytest.mark.parametrize(("name", "args", "options"), LAYERS)
def test_agrees_with_pytorch(name: str, args: Any, options: Any) -> None:
    ours, theirs = twins(name, *args, **options)
    array = draw(3, 4, 6, low=-5.0, high=5.0)
    agree(ours, theirs, array, rtol=1e-7, atol=1e-8)
    agree(ours.float(), theirs.float(), array.astype(np.float32), rtol=1e-5, atol=1e-6)


MANY = 70_001  # more than two tiles, and an odd piece


@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "softplus", "logsigmoid", "elu", "hardswish", "leaky_relu"])
def test_tiles_join(name: str) -> None:
    array = np.linspace(-8, 8, MANY * 2, dtype=np.float32).reshape(2, MANY)
    for each in (array, array.T):
        agree_as_functions(name, each, rtol=1e-6, atol=1e-6)


SMOOTH = "selu celu gelu silu mish softplus softsign logsigmoid sigmoid tanh elu"
KINKED = "relu relu6 leaky_relu hardtanh hardswish hardsigmoid"


@pytest.mark.parametrize("name", f"{SMOOTH} {KINKED}".split())
def test_special_values_as_pytorch(name: str) -> None:
    finite = np.array([0.0, -0.0, 90.0, -90.0, 3.0, -3.0, 1.0, -1.0, 6.0, 1e-30, 20.5], np.float32)
    agree_as_functions(name, finite, rtol=1e-6, atol=1e-6)
    # PyTorch's gelu of inf is nan.
    special = np.array([np.nan, 4.0 if name == "gelu" else np.inf], np.float32)
    ours, theirs = (getattr(t.nn.functional, name)(t.tensor(special)).numpy() for t in (ddp, torch))
    assert_allclose(ours, theirs, rtol=1e-6)


def test_in_place() -> None:
    x = ddp.tensor([-1.0, 2.0])
    assert F.relu(x, inplace=True) is x
    assert x.tolist() == [0.0, 2.0]
    leaf = ddp.ones(2, requires_grad=True)
    with pytest.raises(InplaceError, match="relu_"):
        F.relu(leaf, inplace=True)
    with pytest.raises(InplaceError, match="silu_"):
        F.silu(leaf, inplace=True)
    y = leaf * 2
    F.silu(y, inplace=True).sum().backward()
    s = 1 / (1 + math.exp(-2))
    assert leaf.grad.tolist() == pytest.approx([2 * (s + 2 * s * (1 - s))] * 2)


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "sigmoid", "tanh"])
def test_backward_does_not_need_the_input(name: str) -> None:
    x = ddp.tensor([-0.5, 0.5, 9.0], requires_grad=True)
    y = x * 2
    z = getattr(F, name)(y)
    expected = ddp.autograd.grad(z.sum(), x, retain_graph=True)[0].tolist()
    y.fill_(1)
    assert ddp.autograd.grad(z.sum(), x)[0].tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bound", [0.1, 0.7])  # bfloat16 has a larger and a smaller number
def test_bounds_that_no_number_of_the_dtype_has(dtype: str, bound: float) -> None:
    x = ddp.tensor([-1.0, 0.05, 1.0], dtype=getattr(ddp, dtype), requires_grad=True)
    F.hardtanh(x, -bound, bound).sum().backward()
    assert x.grad.tolist() == [0, 1, 0]


def test_channels_fall_whole() -> None:
    ddp.manual_seed(0)
    for layer, shape in ((nn.Dropout1d(0.5), (4, 50, 7)), (nn.Dropout2d(0.5), (4, 50, 3, 5))):
        y = layer(ddp.ones(*shape)).numpy().reshape(200, -1)
        assert set(np.unique(y)) == {0.0, 2.0}
        assert (y == y[:, :1]).all()
        assert 60 < (y[:, 0] == 0).sum() < 140
        assert layer.eval()(x := ddp.ones(*shape)) is x
    x = ddp.ones(30, 2, 2, requires_grad=True)
    y = F.dropout2d(x, 0.4)
    y.sum().backward()
    assert_array_equal(x.grad.numpy(), y.detach().numpy())


@pytest.mark.filterwarnings("ignore:Implicit dimension:UserWarning")  # PyTorch's
def test_softmax_without_dim() -> None:
    for shape in ((4,), (3, 4), (2, 3, 4), (2, 2, 2, 2)):
        agree_as_functions("softmax", draw(*shape))
    assert F.log_softmax(ddp.tensor([1, 2]), 0, dtype=ddp.float64).dtype == ddp.float64


def test_the_signature_of_a_layer_is_that_of_its_settings() -> None:
    class Scaled(nn.ReLU):
        def __init__(self, factor: float) -> None:
            super().__init__(inplace=True)

    assert str(inspect.signature(nn.LeakyReLU)) == "(negative_slope: 'float' = 0.01, inplace: 'bool' = False)"
    assert list(inspect.signature(Scaled).parameters) == ["factor"]
    assert Scaled(2.0).inplace


def test_refusals() -> None:
    check_refusals(
        {
            ArgumentError: {
                "'none' or 'tanh', not 'erf'": lambda: F.gelu(ddp.ones(2), approximate="erf"),
                "min_val 2 is above max_val 1": lambda: F.hardtanh(ddp.ones(2), 2, 1),
                "Dropout2d: p is a probability, not 2.0": lambda: nn.Dropout2d(2.0),
            },
            DtypeError: {"^gelu: expected a floating tensor, got int64": lambda: F.gelu(ddp.tensor([1]))},
            TypeError: {"got an unexpected keyword argument 'inplce'": lambda: nn.ReLU(inplce=True)},
            ShapeError: {
                r"\(2, 3\): expected an even size in dimension -1": lambda: F.glu(ddp.ones(2, 3)),
                r"weight \(2,\) for input \(2, 3\): expected \(3,\)": lambda: F.prelu(ddp.ones(2, 3), ddp.ones(2)),
                r"expected \(N, C, H, W\)": lambda: F.dropout2d(ddp.ones(2)),
            },
        }
    )


IN_PLACE: dict[str, Any] = {"elu_": (0.5,), "selu_": (), "celu_": (0.7,), "hardtanh_": (-0.3, 0.4)}
IN_PLACE |= {"leaky_relu_": (0.2,), "relu_": (), "threshold_": (0.1, 3.0)}


@pytest.mark.parametrize(("name", "args"), IN_PLACE.items())
def test_forms_in_place(name: str, args: Any) -> None:
    pair = [lambda x, t=t: getattr(t.nn.functional, name)(x, *args) for t in (ddp, torch)]
    agree(*pair, draw(3, 4), rtol=1e-6)  # PyTorch keeps 1/alpha in float32
    x = ddp.tensor(draw(3, 4))
    assert getattr(F, name)(x, *args) is x


def test_gumbel_samples_follow_the_probabilities() -> None:
    ddp.manual_seed(0)
    share = [0.5, 0.3, 0.2]
    samples = F.gumbel_softmax(ddp.tensor(share).log().expand(20000, 3), tau=0.5, hard=True)
    assert_allclose(samples.numpy().max(1), 1, 1e-6)
    assert_allclose(samples.numpy().mean(0), share, atol=0.02)
