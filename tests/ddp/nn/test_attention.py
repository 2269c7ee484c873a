"""Scaled dot-product attention. The layers on it are in test_transformer."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.backends import native
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.attention import SDPBackend, sdpa_kernel
from ddp.nn.functional import scaled_dot_product_attention as attend
from ddp.ops import attention
from tests.ddp.nn import against_torch
from tests.ddp.nn.against_torch import agree_as_functions, check_refusals, numbers

pytest.importorskip("torch", reason="PyTorch is the oracle here")


def leaves(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[ddp.Tensor]:
    return [ddp.from_numpy(numbers(*s, seed=i).astype(dtype)).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.parametrize("form", ["as it is", "formula", "formula, a head at a time"])
@pytest.mark.parametrize("how", ["plain", "causal", "bool", "float", "grouped", "hidden"])
def test_against_torch(how: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form != "as it is":
        for each in ("forward", "backward"):
            monkeypatch.setattr(attention.attention, each, getattr(attention.attention.reference, each))
        if "head" in form:
            monkeypatch.setattr(attention, "score_bytes", lambda xp: 1)
    shared = 2 if how == "grouped" else 4
    arrays = [numbers(3, n, *sizes, seed=n) for n, *sizes in ((4, 40, 8), (shared, 50, 8), (shared, 50, 6))]
    if how in ("bool", "hidden"):
        seen = np.random.default_rng(5).random((3, 1, 40, 50)) < 0.5
        if how == "hidden":
            seen[1, :, 7:20] = False  # queries that may see no key
            seen[2] = False
        arrays.append(seen)
    elif how == "float":
        arrays.append(numbers(4, 40, 50, seed=6))
        arrays[-1][:, :, 3] = -np.inf
    options = {"is_causal": how == "causal", "enable_gqa": how == "grouped"}
    agree_as_functions("scaled_dot_product_attention", *arrays, **options)


def test_not_finite() -> None:
    q, k, v = (numbers(1, 4, 3, seed=i) for i in range(3))
    q[0, 1, 0] = np.nan
    k[0, 3, 0] = np.inf
    y = attend(*map(ddp.from_numpy, (q, k, v)), is_causal=True).numpy()
    assert np.isfinite(y[0, [0, 2]]).all()
    assert np.isnan(y[0, 1]).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_may_see_no_key_has_weights_of_zero_and_finite_gradients(kind: str) -> None:
    layer = ddp.nn.MultiheadAttention(8, 2).double()
    x = ddp.tensor(numbers(4, 2, 8))
    hidden = np.triu(np.ones((4, 4), bool), 1)
    hidden[2] = True
    mask = hidden if kind == "bool" else np.where(hidden, -np.inf, 0.5)
    results = []
    for need_weights in (True, False):
        layer.zero_grad()
        y, weights = layer(x, x, x, attn_mask=ddp.tensor(mask), need_weights=need_weights)
        y.square().sum().backward()
        results.append([y.detach().numpy(), *[p.grad.numpy().copy() for p in layer.parameters()]])
        if need_weights:
            assert weights[:, 2].tolist() == [[0.0] * 4] * 2
    for with_weights, without in zip(*results, strict=True):
        assert_allclose(with_weights, without, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}])
def test_dropout(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "score_bytes", lambda xp: 1)

    def fn(*inputs: ddp.Tensor) -> ddp.Tensor:
        ddp.manual_seed(3)
        return attend(*inputs, dropout_p=0.3, **options)

    kv = (1, 1, 20, 2) if options.get("enable_gqa") else (1, 2, 20, 2)
    assert ddp.autograd.gradcheck(fn, leaves((1, 2, 20, 2), kv, kv))
    a = fn(*leaves((1, 2, 20, 2), kv, kv))
    b = attend(*leaves((1, 2, 20, 2), kv, kv), dropout_p=0.3, **options)
    assert not np.allclose(a.detach().numpy(), b.detach().numpy())


def test_autocast_makes_dtypes_one() -> None:
    q = ddp.randn(2, 3, 4, 8).requires_grad_()
    with ddp.amp.autocast("cpu", dtype=ddp.float16):
        y = attend(q, q, q.half(), ddp.zeros(4, 4))
    assert y.dtype == ddp.float16
    y.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == ddp.float32


@pytest.mark.skipif(not native.is_available(), reason=native.why_not())
def test_memory_is_linear_in_the_length() -> None:
    # The probabilities alone would be 4 heads * 2048^2 * 4 bytes = 64 MiB.
    q, k, v = leaves((1, 4, 2048, 16), (1, 4, 2048, 16), (1, 4, 2048, 16), dtype=np.float32)
    tracemalloc.start()
    try:
        y = attend(q, k, v, is_causal=True)
        y.backward(ddp.ones_like(y))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20


def test_refusals() -> None:
    def of(*shapes: tuple[int, ...], **options: Any) -> Any:
        return lambda: attend(*(ddp.zeros(shape) for shape in shapes), **options)

    three = [(2, 3)] * 3
    mixed = (ddp.zeros(2, 3), ddp.zeros(2, 3, dtype=ddp.float64), ddp.zeros(2, 3))
    check_refusals(
        {
            ShapeError: {
                r"query \(2, 4, 3\), key \(2, 5, 4\), value \(2, 5, 3\)": of((2, 4, 3), (2, 5, 4), (2, 5, 3)),
                r"leading axes of query \(2, 4, 3\), key \(3, 4, 3\)": of((2, 4, 3), (3, 4, 3), (2, 4, 3)),
                r"attn_mask \(3, 3\) does not broadcast to": of((2, 4, 3), (2, 5, 3), (2, 5, 3), (3, 3)),
                "4 heads of query are no multiple": of((1, 4, 2, 3), (1, 3, 2, 3), (1, 3, 2, 3), enable_gqa=True),
            },
            DtypeError: {"float32, float64, float32": lambda: attend(*mixed)},
            ArgumentError: {"exclude each other": of(*three, (2, 2), is_causal=True)},
        }
    )


def test_a_way_that_is_asked_for_changes_nothing() -> None:
    q, k, v = leaves((2, 3, 4), (2, 3, 4), (2, 3, 4))
    asked = SDPBackend.MATH, [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backends in asked:
        with sdpa_kernel(backends):
            inside = attend(q, k, v)
        assert inside.tolist() == attend(q, k, v).tolist() == sdpa_kernel(backends)(attend)(q, k, v).tolist()
    for name, member in SDPBackend.__members__.items():
        assert member.value == int(getattr(against_torch.torch.nn.attention.SDPBackend, name))
    with pytest.raises(DtypeError, match="expected an SDPBackend or a list of them, got 'math'"), sdpa_kernel("math"):  # type: ignore[arg-type]
        pass
    assert not hasattr(ddp.nn, "SDPBackend")
    assert not hasattr(ddp.nn.functional, "sdpa_kernel")
