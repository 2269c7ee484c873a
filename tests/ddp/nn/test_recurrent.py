"""Recurrent layers against PyTorch: one state dict gives the same outputs, last states and gradients."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.utils import rnn
from ddp.ops import cpu_blocking

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def twins(name: str, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    theirs = getattr(torch.nn, name)(*args, **options).double()
    ours = getattr(nn, name)(*args, **options).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    ours.load_state_dict({key: value.detach().numpy() for key, value in theirs.state_dict().items()})
    return torch, ours, theirs


def flat(results: Any) -> list[Any]:
    if not isinstance(results, tuple):
        return [results]
    return [x for each in results for x in flat(each)]


def same(torch: Any, ys: Any, expected: Any, ours: list[Any], theirs: list[Any]) -> None:
    ours_loss, theirs_loss = ddp.zeros((), dtype=ddp.float64), torch.zeros((), dtype=torch.float64)
    for i, (y, reference) in enumerate(zip(flat(ys), flat(expected), strict=True)):
        assert y.shape == tuple(reference.shape)
        np.testing.assert_allclose(y.detach().numpy(), reference.detach().numpy(), **CLOSE)
        g = numbers(*y.shape, seed=i)
        ours_loss = ours_loss + (y * ddp.tensor(g)).sum()
        theirs_loss = theirs_loss + (reference * torch.tensor(g)).sum()
    ours_loss.backward()
    theirs_loss.backward()
    for x, reference in zip(ours, theirs, strict=True):
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), reference.grad.numpy(), **CLOSE)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"num_layers": 3, "bias": False},
        {"bidirectional": True},
    ],
)
@pytest.mark.parametrize("name", ["RNN", "RNN relu", "LSTM", "LSTM projected", "GRU"])
def test_layers_agree_with_pytorch(name: str, options: dict[str, Any], batched: bool, given: bool) -> None:
    kind, _, how = name.partition(" ")
    special: dict[str, Any] = {"relu": {"nonlinearity": "relu"}, "projected": {"proj_size": 2}}.get(how, {})
    torch, ours, theirs = twins(kind, 3, 4, **options, **special)
    shape: tuple[int, ...] = (5, 3)
    if batched:
        shape = (2, 5, 3) if options.get("batch_first") else (5, 2, 3)
    many = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    sizes = [special.get("proj_size", 4), 4][: 2 if kind == "LSTM" else 1]
    arrays = [numbers(*shape)] + [numbers(many, *([2] if batched else []), n, seed=9 + n) for n in sizes if given]
    xs = [ddp.tensor(x, requires_grad=True) for x in arrays]
    ts = [torch.tensor(x, requires_grad=True) for x in arrays]

    def call(layer: Any, x: Any, *states: Any) -> Any:
        if not states:
            return layer(x)
        return layer(x, states if kind == "LSTM" else states[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of a slower way for projections
        expected = call(theirs, *ts)
    same(torch, call(ours, *xs), expected, [*xs, *ours.parameters()], [*ts, *theirs.parameters()])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RNNCell", {}),
        ("RNNCell", {"nonlinearity": "relu", "bias": False}),
        ("LSTMCell", {}),
        ("LSTMCell", {"bias": False}),
        ("GRUCell", {}),
        ("GRUCell", {"bias": False}),
    ],
)
def test_cells_agree_with_pytorch(name: str, options: dict[str, Any], batched: bool, given: bool) -> None:
    torch, ours, theirs = twins(name, 3, 4, **options)
    lead = (2,) if batched else ()
    states = 2 if name == "LSTMCell" else 1
    arrays = [numbers(*lead, 3)] + [numbers(*lead, 4, seed=i + 1) for i in range(states) if given]
    xs = [ddp.tensor(x, requires_grad=True) for x in arrays]
    ts = [torch.tensor(x, requires_grad=True) for x in arrays]

    def call(layer: Any, x: Any, *states: Any) -> Any:
        if not states:
            return layer(x)
        return layer(x, states if name == "LSTMCell" else states[0])

    same(torch, call(ours, *xs), call(theirs, *ts), [*xs, *ours.parameters()], [*ts, *theirs.parameters()])


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_dropout_between_layers(name: str) -> None:
    layer = getattr(nn, name)(3, 4, num_layers=2, dropout=0.5)
    x = ddp.randn(5, 2, 3)
    assert not np.allclose(layer(x)[0].detach().numpy(), layer(x)[0].detach().numpy())
    layer.eval()
    np.testing.assert_array_equal(layer(x)[0].detach().numpy(), layer(x)[0].detach().numpy())
    with pytest.warns(UserWarning, match="between layers"):
        getattr(nn, name)(3, 4, dropout=0.5)


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_half_precision_and_the_empty_batch(name: str) -> None:
    wide = getattr(nn, name)(3, 4, bidirectional=True)
    half = getattr(nn, name)(3, 4, bidirectional=True)
    half.load_state_dict(wide.state_dict())
    half.half()
    x = ddp.randn(6, 2, 3)
    y = half(x.half())[0]
    y.sum().backward()
    assert y.dtype == ddp.float16
    np.testing.assert_allclose(y.detach().numpy(), wide(x)[0].detach().numpy(), atol=5e-3)
    assert all(p.grad is not None and p.grad.dtype == ddp.float16 for p in half.parameters())
    out, _ = wide(ddp.randn(6, 0, 3))
    assert out.shape == (6, 0, 8)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum().item() == 0 for p in wide.parameters())


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_a_result_may_be_written_to(name: str) -> None:
    layer = getattr(nn, name)(3, 4)
    x = ddp.randn(5, 2, 3)
    layer(x)[0].sum().backward()
    expected = layer.weight_hh_l0.grad.clone()
    layer.zero_grad()
    out = layer(x)[0]
    out.detach().zero_()
    out.sum().backward()
    np.testing.assert_array_equal(layer.weight_hh_l0.grad.numpy(), expected.numpy())


def test_strips() -> None:
    assert cpu_blocking.strips(32, 128, 512, most=1_000_000) == 4
    assert cpu_blocking.strips(16, 256, 1024, most=1_000_000) == 8
    assert cpu_blocking.strips(8, 64, 256, most=1_000_000) == 1  # small enough
    assert cpu_blocking.strips(64, 512, 2048, most=1_000_000) == 1  # no strip would be
    assert cpu_blocking.strips(0, 3, 4, most=1_000_000) == 1


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_products_by_strips_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = getattr(nn, name)(3, 6).double()
    x = ddp.tensor(numbers(5, 2, 3))
    layer(x)[0].sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    monkeypatch.setattr(cpu_blocking, "NARROWEST", 1)
    monkeypatch.setattr(cpu_blocking, "largest_unpacked", lambda xp: 24)
    layer(x)[0].sum().backward()
    for p, g in zip(layer.parameters(), expected, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), g.numpy(), **CLOSE)


def test_errors() -> None:
    layer = nn.LSTM(3, 4)
    with pytest.raises(ShapeError, match=r"LSTM: input \(5, 2, 4\): expected \(T, N, 3\)"):
        layer(ddp.zeros(5, 2, 4))
    with pytest.raises(ShapeError, match=r"initial state \(1, 2, 5\): expected \(1, 2, 4\)"):
        layer(ddp.zeros(5, 2, 3), (ddp.zeros(1, 2, 5), ddp.zeros(1, 2, 4)))
    with pytest.raises(ShapeError, match="1 initial states; expected 2"):
        layer(ddp.zeros(5, 2, 3), ddp.zeros(1, 2, 4))
    with pytest.raises(ShapeError, match="no time step"):
        layer(ddp.zeros(0, 2, 3))
    with pytest.raises(DtypeError, match="initial state of float64 for an input of float32"):
        nn.GRU(3, 4)(ddp.zeros(5, 2, 3), ddp.zeros(1, 2, 4, dtype=ddp.float64))
    for wrong in (ddp.float64, ddp.float16, ddp.int64):
        for each in (nn.RNN(3, 4), nn.GRU(3, 4), nn.LSTM(3, 4)):
            with pytest.raises(DtypeError, match=f"input of {wrong}, state or weights of float32"):
                each(ddp.zeros(5, 2, 3, dtype=wrong))
        with pytest.raises(DtypeError, match=f"GRU: input of {wrong}"):
            nn.GRUCell(3, 4)(ddp.zeros(2, 3, dtype=wrong))
    with pytest.raises(DtypeError, match="packed sequences are not supported"):
        layer([1, 2])
    with pytest.raises(ArgumentError, match="proj_size 4"):
        nn.LSTM(3, 4, proj_size=4)
    with pytest.raises(ArgumentError, match="nonlinearity 'gelu'"):
        nn.RNN(3, 4, nonlinearity="gelu")
    with pytest.raises(ArgumentError, match="hidden_size 0"):
        nn.GRU(3, 0)
    with pytest.raises(ShapeError, match=r"GRUCell: state \(2, 5\) for input \(2, 3\): expected \(2, 4\)"):
        nn.GRUCell(3, 4)(ddp.zeros(2, 3), ddp.zeros(2, 5))
    with pytest.raises(ShapeError, match=r"LSTMCell: input \(2, 4\)"):
        nn.LSTMCell(3, 4)(ddp.zeros(2, 4))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_sequence(batch_first: bool, side: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    arrays = [numbers(n, 2, seed=n) for n in (3, 1, 0, 4)]
    xs = [ddp.tensor(x, requires_grad=True) for x in arrays]
    y = rnn.pad_sequence(xs, batch_first, -1.0, side)
    expected = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in arrays], batch_first, -1.0, side)
    np.testing.assert_array_equal(y.detach().numpy(), expected.numpy())
    y.sum().backward()
    assert all(x.grad is not None and (x.grad.numpy() == 1).all() for x in xs)
    if side == "right":
        for each, array in zip(rnn.unpad_sequence(y, [3, 1, 0, 4], batch_first), arrays, strict=True):
            np.testing.assert_array_equal(each.detach().numpy(), array)


def test_pad_sequence_errors() -> None:
    with pytest.raises(ShapeError, match=r"\(3, 2\), \(3, 1\)"):
        rnn.pad_sequence([ddp.zeros(3, 2), ddp.zeros(3, 1)])
    with pytest.raises(ArgumentError, match="at least one"):
        rnn.pad_sequence([])
    with pytest.raises(ArgumentError, match="'up'"):
        rnn.pad_sequence([ddp.zeros(3)], padding_side="up")
    with pytest.raises(ShapeError, match="3 lengths"):
        rnn.unpad_sequence(ddp.zeros(3, 2), [1, 2, 3])
