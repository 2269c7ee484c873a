"""Layers of attention against PyTorch: one state dict gives the same values and gradients, with every kind of mask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import nn
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import attention
from tests.ddp.nn.against_torch import agree, check_refusals, numbers, torch, twins

pytest.importorskip("torch", reason="PyTorch is the oracle here")

ATTENTIONS: list[tuple[Any, ...]] = [
    ({}, {}),
    ({"batch_first": True}, {}),
    ({"kdim": 3, "vdim": 5, "bias": False, "batch_first": True}, {"padding": "bool"}),
    ({}, {"mask": "float"}),
    ({}, {"mask": "heads"}),
    ({}, {"mask": "float", "padding": "bool"}),
    ({"batch_first": True}, {"mask": "bool", "padding": "float"}),
    ({"add_bias_kv": True}, {"mask": "bool", "padding": "bool"}),
    ({"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}, {"mask": "float"}),
]


@pytest.mark.parametrize(("options", "how"), ATTENTIONS)
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")  # PyTorch's, of masks of two dtypes
def test_attention(options: Any, how: Any) -> None:
    for batch, weights in itertools.product((2, None), (False, True, "each")):
        check_attention(options, how, batch, weights)


def check_attention(options: Any, how: Any, batch: int | None, weights: Any) -> None:
    ours, theirs = twins("MultiheadAttention", 8, 2, **options)
    length, keys = 4, 5

    def shaped(n: int, width: int) -> tuple[int, ...]:
        if batch is None:
            return (n, width)
        return (batch, n, width) if options.get("batch_first") else (n, batch, width)

    shapes = shaped(length, 8), shaped(keys, ours.kdim), shaped(keys, ours.vdim)
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
    call = {"need_weights": bool(weights), "average_attn_weights": weights is True}
    result = agree(ours, theirs, *(numbers(*shape, seed=i) for i, shape in enumerate(shapes)), **extra, **call)
    assert len(result) == (2 if weights else 1)


def test_attention_dropout_and_the_empty_batch() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.5)
    x = ddp.randn(4, 3, 8)
    for weights in (False, True):
        first = layer(x, x, x, need_weights=weights)[0]
        second = layer(x, x, x, need_weights=weights)[0]
        assert not np.allclose(first.detach().numpy(), second.detach().numpy())
    layer.eval()
    assert_allclose(
        layer(x, x, x)[0].detach().numpy(), layer(x, x, x, need_weights=False)[0].detach().numpy(), atol=1e-6
    )
    nothing = ddp.randn(4, 0, 8)
    assert layer(nothing, nothing, nothing, need_weights=False)[0].shape == (4, 0, 8)
    assert layer(nothing, nothing, nothing)[0].shape == (4, 0, 8)


NORM_FIRST = {"norm_first": True, "activation": "gelu"}


@pytest.mark.parametrize("options", [NORM_FIRST, {"batch_first": True, "bias": False, "layer_norm_eps": 1e-3}])
@pytest.mark.parametrize("masked", [None, "causal bool", "both"])
def test_encoder(options: Any, masked: str | None) -> None:
    shape = (3, 5, 8) if options.get("batch_first") else (5, 3, 8)
    extra: dict[str, np.ndarray[Any, Any]] = {}
    if masked == "causal bool":
        extra["src_mask"] = np.triu(np.ones((5, 5), bool), 1)
    elif masked == "both":
        extra["src_mask"] = nn.Transformer.generate_square_subsequent_mask(5, dtype=ddp.float64).numpy()
    if masked == "both":
        extra["src_key_padding_mask"] = np.where(np.arange(5) > [[3], [4], [2]], -np.inf, 0.0)
    agree(*twins("TransformerEncoderLayer", 8, 2, 16, dropout=0.0, **options), numbers(*shape), **extra)


def test_stack_of_encoders_sees_that_a_mask_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(nn: Any) -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(8)).double()

    ours, theirs = made(nn), made(torch.nn)
    assert repr(ours) == repr(theirs)
    assert len({id(p) for p in ours.parameters()}) == 26  # the layers are copies
    ours.load_state_dict(theirs.state_dict())
    seen: list[bool] = []
    attend = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *args: seen.append(args[-1]) or attend(*args))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=ddp.float64).numpy()
    agree(ours, theirs, numbers(3, 5, 8), mask=mask)
    x = ddp.tensor(numbers(3, 5, 8))
    ours(x, ddp.tensor(np.isinf(mask)))
    ours(x, ddp.tensor(np.tril(mask, 3)))
    assert seen == [True] * 4 + [False] * 2


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu", "batch_first": True}])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformer(options: Any) -> None:
    sizes = [(3, 5, 8), (3, 4, 8)] if options else [(5, 3, 8), (4, 3, 8)]
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=ddp.float64).numpy()
    arrays = [numbers(*size, seed=i) for i, size in enumerate(sizes)]
    agree(*twins("Transformer", 8, 2, 1, 2, 16, dropout=0.0, **options), *arrays, tgt_mask=mask)


def test_refusals() -> None:
    layer = nn.MultiheadAttention(8, 2)
    x = ddp.randn(4, 3, 8)
    padding = ddp.zeros(4, 3)
    check_refusals(
        {
            ArgumentError: {"embed_dim 8 is no multiple of num_heads 3": lambda: nn.MultiheadAttention(8, 3)},
            ShapeError: {
                r"expected \(4, 4\) or \(6, 4, 4\)": lambda: layer(x, x, x, attn_mask=ddp.zeros(4, 5)),
                r"key_padding_mask \(4, 3\): not \(3, 4\)": lambda: layer(x, x, x, key_padding_mask=padding),
            },
        }
    )
