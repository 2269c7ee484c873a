"""Attention by tiles: what a table of small cases cannot see. The layers on it are in test_transformer."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.functional import scaled_dot_product_attention as attend
from ddp.ops import attention
from tests.ddp.nn.against_torch import agree_as_functions, check_refusals, numbers


def leaves(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[ddp.Tensor]:
    return [ddp.from_numpy(numbers(*s, seed=i).astype(dtype)).requires_grad_() for i, s in enumerate(shapes)]


def test_grid() -> None:
    assert attention.grid((2, 3), 100, 50, False, 4, tile=50 * 4 * 30)[4:] == (30, 1)
    assert attention.grid((2, 3), 20, 50, False, 4, tile=50 * 4 * 40)[4:] == (20, 2)
    assert attention.grid((2, 64), 128, 128, True, 4, tile=512 << 10)[4:] == (64, 16)
    assert attention.grid((1,), 5, 0, False, 4, tile=100)[4:] == (16, 1)
    cut = attention.grid((2, 3), 70, 50, True, 4, tile=50 * 4 * 2 * 32)
    assert list(cut.groups()) == [(0, slice(0, 1)), (0, slice(1, 2)), (0, slice(2, 3))] + [
        (1, slice(0, 1)),
        (1, slice(1, 2)),
        (1, slice(2, 3)),
    ]
    assert list(cut.blocks()) == [(64, 70, 50), (0, 64, 50)]
    assert list(attention.grid((1,), 130, 200, True, 4, tile=1 << 20).blocks()) == [
        (128, 130, 130),
        (64, 128, 128),
        (0, 64, 64),
    ]


@pytest.mark.parametrize("tile", [1, 16 * 50 * 8 * 3, 1 << 20])
@pytest.mark.parametrize(
    "how", ["plain", "causal", "bool", "float", "grouped", "hidden"], ids=lambda x: x if isinstance(x, str) else ""
)
def test_many_tiles_are_as_one(how: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "score_bytes", lambda xp: tile)
    monkeypatch.setattr(attention, "FEWEST", 8)
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


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}])
def test_dropout(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "score_bytes", lambda xp: 16 * 6 * 8 * 2)

    def fn(*inputs: ddp.Tensor) -> ddp.Tensor:
        ddp.manual_seed(3)
        return attend(*inputs, dropout_p=0.3, **options)

    kv = (1, 1, 20, 2) if options.get("enable_gqa") else (1, 2, 20, 2)
    assert ddp.autograd.gradcheck(fn, leaves((1, 2, 20, 2), kv, kv))
    a, b = fn(*leaves((1, 2, 20, 2), kv, kv)), attend(*leaves((1, 2, 20, 2), kv, kv), dropout_p=0.3, **options)
    assert not np.allclose(a.detach().numpy(), b.detach().numpy())


def test_autocast_makes_dtypes_one() -> None:
    q = ddp.randn(2, 3, 4, 8).requires_grad_()
    with ddp.amp.autocast("cpu", dtype=ddp.float16):
        y = attend(q, q, q.half(), ddp.zeros(4, 4))
    assert y.dtype == ddp.float16
    y.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == ddp.float32


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

    three, mixed = [(2, 3)] * 3, (ddp.zeros(2, 3), ddp.zeros(2, 3, dtype=ddp.float64), ddp.zeros(2, 3))
    check_refusals(
        (of((2, 4, 3), (2, 5, 4), (2, 5, 3)), ShapeError, r"query \(2, 4, 3\), key \(2, 5, 4\), value \(2, 5, 3\)"),
        (of((2, 4, 3), (2, 5, 3), (2, 6, 3)), ShapeError, r"value \(2, 6, 3\)"),
        (of((2, 4, 3), (3, 4, 3), (2, 4, 3)), ShapeError, r"leading axes of query \(2, 4, 3\), key \(3, 4, 3\)"),
        (of((2, 4, 3), (2, 5, 3), (2, 5, 3), (3, 3)), ShapeError, r"attn_mask \(3, 3\) does not broadcast to"),
        (of((1, 4, 2, 3), (1, 3, 2, 3), (1, 3, 2, 3), enable_gqa=True), ShapeError, "4 heads of query are no multiple"),
        (lambda: attend(*mixed), DtypeError, "float32, float64, float32"),
        (of(*three, attn_mask=ddp.zeros(2, 2, dtype=ddp.int64)), DtypeError, "attn_mask is bool or float32"),
        (of(*three, (2, 2), is_causal=True), ArgumentError, "exclude each other"),
        (of(*three, dropout_p=1.5), ArgumentError, r"not 1\.5"),
    )
