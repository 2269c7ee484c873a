"""Layers of attention against PyTorch: one state dict gives the same values and gradients, with every kind of mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import attention

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def twins(name: str, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
    """PyTorch, its layer and ours with the same weights, in float64; biases too are not zero."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(*args, **options).double()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours = getattr(nn, name)(*args, **options).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    assert repr(ours) == repr(theirs)
    return torch, ours, theirs


def same_gradients(torch: Any, y: Any, expected: Any, ours: list[Any], theirs: list[Any]) -> None:
    np.testing.assert_allclose(y.detach().numpy(), expected.detach().numpy(), **CLOSE)
    g = numbers(*y.shape, seed=7)
    y.backward(ddp.tensor(g))
    expected.backward(torch.tensor(g))
    for x, reference in zip(ours, theirs, strict=True):
        assert (x.grad is None) == (reference.grad is None)
        if x.grad is not None:
            np.testing.assert_allclose(x.grad.numpy(), reference.grad.numpy(), **CLOSE)


ATTENTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"bias": False}, {}),
    ({"batch_first": True}, {}),
    ({"kdim": 3, "vdim": 5}, {}),
    ({"kdim": 3, "vdim": 5, "bias": False, "batch_first": True}, {"padding": "bool"}),
    ({}, {"mask": "bool"}),
    ({}, {"mask": "float"}),
    ({}, {"mask": "heads"}),
    ({}, {"mask": "float", "padding": "bool"}),
    ({"batch_first": True}, {"mask": "bool", "padding": "float"}),
    ({"add_bias_kv": True}, {"mask": "bool", "padding": "bool"}),
    ({"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}, {"mask": "float"}),
    ({"add_zero_attn": True}, {}),
]


@pytest.mark.parametrize("weights", [False, True, "each"])
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize(("options", "how"), ATTENTIONS)
def test_attention(options: Any, how: Any, batch: int | None, weights: Any) -> None:
    torch, ours, theirs = twins("MultiheadAttention", 8, 2, **options)
    length, keys = 4, 5

    def shaped(n: int, width: int) -> tuple[int, ...]:
        if batch is None:
            return (n, width)
        return (batch, n, width) if options.get("batch_first") else (n, batch, width)

    shapes = shaped(length, 8), shaped(keys, ours.kdim), shaped(keys, ours.vdim)
    arrays = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
    extra: dict[str, np.ndarray[Any, Any]] = {}
    if "mask" in how:
        hidden = np.random.default_rng(4).random((length, keys)) < 0.4
        hidden[:, 0] = False
        every = numbers(2 * (batch or 1), length, keys, seed=5)
        extra["attn_mask"] = {"bool": hidden, "float": every[0], "heads": every}[how["mask"]]
    if "padding" in how:
        padded = np.zeros((batch or 1, keys), bool)
        padded[:, -2:] = True
        padding: np.ndarray[Any, Any] = padded if how["padding"] == "bool" else np.where(padded, -3.0, 0.5)
        extra["key_padding_mask"] = padding if batch else padding[0]
    mixed = len({x.dtype for x in extra.values()}) > 1
    call = {"need_weights": bool(weights), "average_attn_weights": weights is True}
    xs = [ddp.tensor(x, requires_grad=True) for x in arrays]
    ts = [torch.tensor(x, requires_grad=True) for x in arrays]
    y, w = ours(*xs, **{k: ddp.tensor(v) for k, v in extra.items()}, **call)
    if mixed:  # PyTorch warns of it
        extra = {k: np.where(v, -np.inf, 0.0) if v.dtype == bool else v for k, v in extra.items()}
    expected, expected_w = theirs(*ts, **{k: torch.tensor(v) for k, v in extra.items()}, **call)
    if weights:
        assert w.shape == tuple(expected_w.shape)
        np.testing.assert_allclose(w.detach().numpy(), expected_w.detach().numpy(), **CLOSE)
    else:
        assert w is None
    same_gradients(torch, y, expected, [*xs, *ours.parameters()], [*ts, *theirs.parameters()])


@pytest.mark.parametrize("shared", ["all", "key and value"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_shared_inputs_take_fewer_products(shared: str, batch_first: bool) -> None:
    torch, ours, theirs = twins("MultiheadAttention", 8, 2, batch_first=batch_first)
    xs = [ddp.tensor(numbers(4, 4, 8, seed=i), requires_grad=True) for i in range(2)]
    ts = [torch.tensor(numbers(4, 4, 8, seed=i), requires_grad=True) for i in range(2)]
    mask = np.triu(np.ones((4, 4), bool), 1)
    query = int(shared != "all")
    how: dict[str, Any] = {"need_weights": False, "is_causal": True}
    y, _ = ours(xs[query], xs[0], xs[0], attn_mask=ddp.tensor(mask), **how)
    expected, _ = theirs(ts[query], ts[0], ts[0], attn_mask=torch.tensor(mask), **how)
    same_gradients(torch, y, expected, [*xs, *ours.parameters()], [*ts, *theirs.parameters()])


def test_attention_dropout_and_the_empty_batch() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.5)
    x = ddp.randn(4, 3, 8)
    for weights in (False, True):
        first, second = layer(x, x, x, need_weights=weights)[0], layer(x, x, x, need_weights=weights)[0]
        assert not np.allclose(first.detach().numpy(), second.detach().numpy())
    layer.eval()
    np.testing.assert_allclose(
        layer(x, x, x)[0].detach().numpy(), layer(x, x, x, need_weights=False)[0].detach().numpy(), atol=1e-6
    )
    nothing = ddp.randn(4, 0, 8)
    assert layer(nothing, nothing, nothing, need_weights=False)[0].shape == (4, 0, 8)
    assert layer(nothing, nothing, nothing)[0].shape == (4, 0, 8)


def test_attention_errors() -> None:
    with pytest.raises(ArgumentError, match="embed_dim 8 is no multiple of num_heads 3"):
        nn.MultiheadAttention(8, 3)
    layer = nn.MultiheadAttention(8, 2)
    x = ddp.randn(4, 3, 8)
    with pytest.raises(ShapeError, match=r"key \(4, 3, 7\)"):
        layer(x, ddp.randn(4, 3, 7), x)
    with pytest.raises(ShapeError, match=r"attn_mask \(4, 5\): expected \(4, 4\) or \(6, 4, 4\)"):
        layer(x, x, x, attn_mask=ddp.zeros(4, 5))
    with pytest.raises(ShapeError, match=r"key_padding_mask \(4, 3\): not \(3, 4\)"):
        layer(x, x, x, key_padding_mask=ddp.zeros(4, 3))
    with pytest.raises(ArgumentError, match="is_causal"):
        layer(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True, "activation": "gelu"},
        {"batch_first": True, "bias": False, "layer_norm_eps": 1e-3},
    ],
)
@pytest.mark.parametrize("masked", [None, "causal", "causal bool", "padding", "both"])
def test_encoder(options: dict[str, Any], masked: str | None) -> None:
    torch, ours, theirs = twins("TransformerEncoderLayer", 8, 2, 16, dropout=0.0, **options)
    shape = (3, 5, 8) if options.get("batch_first") else (5, 3, 8)
    extra: dict[str, np.ndarray[Any, Any]] = {}
    if masked == "causal bool":
        extra["src_mask"] = np.triu(np.ones((5, 5), bool), 1)
    elif masked in ("causal", "both"):
        extra["src_mask"] = nn.Transformer.generate_square_subsequent_mask(5, dtype=ddp.float64).numpy()
    if masked in ("padding", "both"):
        extra["src_key_padding_mask"] = np.where(np.arange(5) > [[3], [4], [2]], -np.inf, 0.0)
    x, t = ddp.tensor(numbers(*shape), requires_grad=True), torch.tensor(numbers(*shape), requires_grad=True)
    y = ours(x, **{k: ddp.tensor(v) for k, v in extra.items()})
    expected = theirs(t, **{k: torch.tensor(v) for k, v in extra.items()})
    same_gradients(torch, y, expected, [x, *ours.parameters()], [t, *theirs.parameters()])


def test_stack_of_encoders_sees_that_a_mask_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    layers = {"dropout": 0.0, "batch_first": True}
    theirs = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 16, **layers), 2, torch.nn.LayerNorm(8)
    ).double()
    ours = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **layers), 2, nn.LayerNorm(8)).double()
    assert repr(ours) == repr(theirs)
    ours.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    x, t = ddp.tensor(numbers(3, 5, 8), requires_grad=True), torch.tensor(numbers(3, 5, 8), requires_grad=True)
    seen: list[bool] = []
    attend = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *args: seen.append(args[-1]) or attend(*args))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    y, expected = ours(x, ddp.tensor(mask.numpy())), theirs(t, mask)
    same_gradients(torch, y, expected, [x, *ours.parameters()], [t, *theirs.parameters()])
    ours(x, ddp.tensor(np.isinf(mask.numpy())))
    ours(x, ddp.tensor(np.tril(mask.numpy(), 3)))
    assert seen == [True] * 4 + [False] * 2


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu", "batch_first": True}])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformer(options: dict[str, Any]) -> None:
    torch, ours, theirs = twins("Transformer", 8, 2, 1, 2, 16, dropout=0.0, **options)
    sizes = [(3, 5, 8), (3, 4, 8)] if options else [(5, 3, 8), (4, 3, 8)]
    xs = [ddp.tensor(numbers(*s, seed=i), requires_grad=True) for i, s in enumerate(sizes)]
    ts = [torch.tensor(numbers(*s, seed=i), requires_grad=True) for i, s in enumerate(sizes)]
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=ddp.float64)
    y, expected = ours(*xs, tgt_mask=mask), theirs(*ts, tgt_mask=torch.tensor(mask.numpy()))
    same_gradients(torch, y, expected, [*xs, *ours.parameters()], [*ts, *theirs.parameters()])


def test_layers_of_a_stack_are_copies() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    first, second = stack.layers
    np.testing.assert_array_equal(first.linear1.weight.detach().numpy(), second.linear1.weight.detach().numpy())
    assert len({id(p) for p in stack.parameters()}) == 24


def test_encoder_in_half_precision_with_dropout() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16).half()
    y = layer(ddp.randn(5, 3, 8, dtype=ddp.float16))
    y.float().sum().backward()
    assert y.dtype == ddp.float16
    assert all(p.grad is not None and np.isfinite(p.grad.numpy()).all() for p in layer.parameters())
    assert layer(ddp.randn(5, 0, 8, dtype=ddp.float16)).shape == (5, 0, 8)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="activation 'tanh'"):
        nn.TransformerEncoderLayer(8, 2, activation="tanh")
