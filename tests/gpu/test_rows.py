"""Dropout, norms and embeddings on the stand-in: what is launched, and numbers beside the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp._cuda import embedding_kernels
from ddp.nn import functional as F

TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}


def cuda(x: Any, dtype: Any = None) -> Any:
    return ddp.tensor(x, dtype=dtype, device="cuda")


def of(x: Any) -> Any:
    """As float64 on the host."""
    return x.detach().cpu().double().numpy()


def test_what_is_dropped_is_drawn_evenly_and_independently(gpu: Any) -> None:
    ddp.manual_seed(1)
    for p in (0.1, 0.5):
        kept = of(F.dropout(ddp.ones(200, 333, device="cuda"), p)) != 0
        n = kept.size
        assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / n)
        flat = kept.reshape(-1).astype(float) - kept.mean()
        for apart in (1, 2, 3, 4, 5, 8, 333):
            assert abs((flat[apart:] * flat[:-apart]).mean()) / (p * (1 - p)) < 5 / np.sqrt(n)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("p", [0.4, 1.0])
def test_whole_channels_fall(gpu: Any, last: bool, p: float) -> None:
    x = ddp.ones(5, 6, 3, 2, device="cuda")
    x = x.contiguous(memory_format=ddp.channels_last if last else ddp.contiguous_format).requires_grad_()
    y = F.dropout2d(x, p)
    assert y.is_contiguous(memory_format=ddp.channels_last) is last
    result = of(y).reshape(30, 6)
    assert (result == result[:, :1]).all()
    assert len(np.unique(result)) == (2 if p < 1 else 1)
    y.backward(ddp.ones(5, 6, 3, 2, device="cuda"))
    assert_array_equal(of(x.grad), of(y))
    lines = F.dropout1d(ddp.ones(9, 4, 7, device="cuda"), 0.5)
    assert (of(lines) == of(lines)[:, :, :1]).all()


DTYPES = ["float64", "float32", "float16", "bfloat16"]


def close(actual: Any, expected: Any, dtype: str) -> None:
    expected = of(expected)
    assert_allclose(
        of(actual), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * max(1, np.abs(expected).max(initial=0))
    )


def on_both(make: Any, run: Any) -> list[list[Any]]:
    """What `run` gives of the tensors that `make` makes, and their gradients, on the CPU and on the GPU."""
    results = []
    for device in ("cpu", "cuda"):
        xs = [None if x is None else x.to(device).detach().requires_grad_() for x in make()]
        y = run(*xs)
        y.backward(ddp.tensor(np.random.default_rng(9).standard_normal(y.shape), dtype=y.dtype, device=device))
        results.append([y, *[None if x is None else x.grad for x in xs]])
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 1), (9, 24), (13, 64), (3, 104), (2, 3, 67), (40, 8), (0, 6)])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_are_normalized_as_on_the_cpu(
    gpu: Any, dtype: str, shape: tuple[int, ...], centered: bool, wide: bool
) -> None:
    rng = np.random.default_rng(0)
    kind = "float32" if wide and dtype in ("float16", "bfloat16") else dtype

    def run(x: Any, w: Any, b: Any = None) -> Any:
        return F.layer_norm(x, shape[-1:], w, b) if centered else F.rms_norm(x, shape[-1:], w)

    inputs = [ddp.tensor(rng.standard_normal(shape) + 5, dtype=dtype)]
    inputs += [ddp.tensor(rng.standard_normal(shape[-1]), dtype=kind) for _ in range(1 + centered)]
    for actual, expected in zip(*reversed(on_both(lambda: inputs, run)), strict=True):
        assert actual.dtype == expected.dtype
        close(actual, expected, dtype)


def looked_up(dtype: str, **how: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(4)
    index = ddp.tensor(rng.integers(0, 11, (6, 9)) ** 2 // 10)
    table = rng.standard_normal((13, how.pop("width", 24)))

    def run(w: Any) -> Any:
        return F.embedding(index.to(w.device), w, **how)

    (y, g), (z, d) = on_both(lambda: [ddp.tensor(table, dtype=dtype)], run)
    assert_array_equal(of(z), of(y))
    return d, g


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"width": 7}, {"width": 80}])
def test_rows_looked_up_are_added_up_as_on_the_cpu(gpu: Any, dtype: str, how: dict[str, Any]) -> None:
    actual, expected = looked_up(dtype, **how)
    assert actual.dtype == expected.dtype
    close(actual, expected, dtype)


def test_many_bfloat16_rows_lose_no_digits_on_the_way(gpu: Any) -> None:
    w = ddp.zeros(3, 8, dtype=ddp.bfloat16, device="cuda", requires_grad=True)
    F.embedding(ddp.zeros(1000, dtype=ddp.int64, device="cuda"), w).sum().backward()
    assert of(w.grad).tolist() == [[1000.0] * 8, [0.0] * 8, [0.0] * 8]  # in bfloat16 a sum would stand still at 256


def test_rows_far_from_zero_keep_their_digits(gpu: Any) -> None:
    x = np.random.default_rng(0).standard_normal((4, 96)) + 3000
    for n in (96, 60):
        expected = F.layer_norm(ddp.tensor(x[:, :n].astype("f4").astype("f8")), (n,))
        assert_allclose(of(F.layer_norm(cuda(x[:, :n], "float32"), (n,))), of(expected), atol=2e-3)


@pytest.mark.parametrize(("room", "blocks"), [(10, 1), (16, 2), (64, 8)])
def test_more_lookups_than_a_block_sorts_at_once(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, room: int, blocks: int
) -> None:
    monkeypatch.setattr(embedding_kernels, "ROOM", room)
    monkeypatch.setattr(embedding_kernels, "_BLOCKS", blocks)
    close(*looked_up("float64", padding_idx=4), "float64")
