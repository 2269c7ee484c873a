"""Recurrent layers against PyTorch: one state dict gives the same outputs, last states and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.utils import rnn
from tests.ddp.nn.against_torch import agree, check_refusals, numbers, torch, twins

pytest.importorskip("torch", reason="PyTorch is the oracle here")


def on_states(layer: Any) -> Any:
    """The layer as a function of the input and, each an argument, the states; its module is kept for its parameters."""
    pairs = type(layer).__name__.startswith("LSTM")
    forward = layer.forward
    layer.forward = lambda x, *states: forward(x, (states if pairs else states[0]) if states else None)
    return layer


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
@pytest.mark.parametrize("name", ["RNN", "RNN relu", "LSTM", "LSTM projected", "GRU"])
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")  # PyTorch's, of a slower way
def test_layers_agree_with_pytorch(name: str, options: Any) -> None:
    kind, _, how = name.partition(" ")
    special: dict[str, Any] = {"relu": {"nonlinearity": "relu"}, "projected": {"proj_size": 2}}.get(how, {})
    for batch, given in itertools.product([(), (2,)], [False, True]):
        shape = (2, 5, 3) if batch and options.get("batch_first") else (5, *batch, 3)
        many = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        sizes = [special.get("proj_size", 4), 4][: 2 if kind == "LSTM" else 1]
        states = [numbers(many, *batch, n, seed=9 + n) for n in sizes if given]
        agree(*map(on_states, twins(kind, 3, 4, **options, **special)), numbers(*shape), *states)


@pytest.mark.parametrize(
    ("name", "options"), [("RNNCell", {"nonlinearity": "relu"}), ("LSTMCell", {}), ("GRUCell", {})]
)
def test_cells_agree_with_pytorch(name: str, options: Any) -> None:
    for batch, given in itertools.product([(), (2,)], [False, True]):
        states = [numbers(*batch, 4, seed=i + 1) for i in range(2 if name == "LSTMCell" else 1) if given]
        agree(*map(on_states, twins(name, 3, 4, bias=False, **options)), numbers(*batch, 3), *states)


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_dropout_between_layers(name: str) -> None:
    layer = getattr(nn, name)(3, 4, num_layers=2, dropout=0.5)
    x = ddp.randn(5, 2, 3)
    assert not np.allclose(layer(x)[0].detach().numpy(), layer(x)[0].detach().numpy())
    layer.eval()
    assert_array_equal(layer(x)[0].detach().numpy(), layer(x)[0].detach().numpy())
    with pytest.warns(UserWarning, match="between layers"):
        getattr(nn, name)(3, 4, dropout=0.5)


def test_refusals() -> None:
    layer = nn.LSTM(3, 4)
    gru = nn.GRU(3, 4)
    x, h, wide = ddp.zeros(5, 2, 3), ddp.zeros(1, 2, 4), ddp.zeros(1, 2, 5)
    check_refusals(
        {
            ShapeError: {
                r"LSTM: input \(5, 2, 4\): expected \(T, N, 3\)": lambda: layer(ddp.zeros(5, 2, 4)),
                r"initial state \(1, 2, 5\): expected \(1, 2, 4\)": lambda: layer(x, (wide, h)),
                r"GRUCell: state \(2, 5\) for input \(2, 3\)": lambda: nn.GRUCell(3, 4)(x[0], wide[0]),
                r"\(3, 2\), \(3, 1\)": lambda: rnn.pad_sequence([ddp.zeros(3, 2), ddp.zeros(3, 1)]),
            },
            DtypeError: {
                "initial state of float64 for an input of float32": lambda: gru(x, h.double()),
                "input of float64, state or weights of float32": lambda: nn.RNN(3, 4)(x.double()),
                "expected tensors, got list": lambda: layer([1, 2]),
            },
            ArgumentError: {
                "proj_size 4": lambda: nn.LSTM(3, 4, proj_size=4),
                "probability, not True": lambda: nn.LSTM(3, 4, 2, True, True, True),
            },
        }
    )


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_sequence(batch_first: bool, side: str) -> None:
    arrays = [numbers(n, 2, seed=n) for n in (3, 1, 0, 4)]
    pair = [lambda *xs, rnn=t.nn.utils.rnn: rnn.pad_sequence(list(xs), batch_first, -1.0, side) for t in (ddp, torch)]
    (y,) = agree(*pair, *arrays)
    if side == "right":
        for each, array in zip(rnn.unpad_sequence(y, [3, 1, 0, 4], batch_first), arrays, strict=True):
            assert_array_equal(each.detach().numpy(), array)
