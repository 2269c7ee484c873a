"""Products by cuBLASLt, or by its stand-in, against NumPy: layouts, batches, dtypes, epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ddp._cuda import capture, cublaslt, gemm
from ddp._precision import matmul as precision
from tests.gpu import cublaslt_fake, on_both
from tests.gpu.installing import Real

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16")] + [BFLOAT16]


@pytest.fixture
def xp(gpu: Any) -> Any:
    return gpu.cupy


def numbers(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) / 2).astype(dtype)


def close(got: Any, expected: Any, dtype: Any = "float64") -> None:
    assert got.shape == expected.shape
    rounding = TOLERANCES[np.dtype(dtype).name]
    size = np.abs(expected).max(initial=1)
    assert_allclose(got.get().astype("f8"), expected, rtol=rounding, atol=rounding * size)


SHAPES: list[Any] = [
    ((2, 3), (3, 4)),
    ((1, 3), (3, 1)),
    ((1, 1), (1, 1)),
    ((5, 1), (1, 4)),
    ((1, 3), (3, 4)),
    ((7, 100), (100, 9)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 1, 2, 3), (4, 3, 2)),
    ((6, 5, 2, 3), (6, 5, 3, 4)),
    ((6, 1, 2, 3), (6, 5, 3, 4)),
    ((33, 1, 2, 3), (1, 34, 3, 4)),
]


@on_both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(xp: Any, dtype: Any) -> None:
    for a, b in SHAPES:
        x = numbers(a, dtype)
        y = numbers(b, dtype, 1)
        expected = x.astype("f8") @ y.astype("f8")
        for _ in range(2):  # found, then kept
            got = gemm.gemm(xp, xp.asarray(x), xp.asarray(y))
            assert got.dtype == dtype
            close(got, np.asarray(expected), dtype)
        out = xp.full(expected.shape, 7, dtype)
        assert gemm.gemm(xp, xp.asarray(x), xp.asarray(y), out) is out
        close(out, np.asarray(expected), dtype)
        out = xp.ones(expected.shape, dtype)
        assert gemm.gemm(xp, xp.asarray(x), xp.asarray(y), out, True) is out
        close(out, np.asarray(expected + 1), dtype)


LAYOUTS = {
    "as it is": lambda xp, x: xp.asarray(x),
    "turned": lambda xp, x: xp.ascontiguousarray(xp.asarray(x).swapaxes(-1, -2)).swapaxes(-1, -2),
    "cut": lambda xp, x: _inside(xp, x, (..., slice(2, -1), slice(1, -3))),
    "turned and cut": lambda xp, x: _inside(xp, x.swapaxes(-1, -2), (..., slice(1, -3), slice(2, -1))).swapaxes(-1, -2),
    "every second": lambda xp, x: xp.asarray(np.repeat(x, 2, -1))[..., ::2],
    "backwards": lambda xp, x: xp.asarray(x[..., ::-1, :].copy())[..., ::-1, :],
    "every second row": lambda xp, x: xp.asarray(np.repeat(x, 2, -2))[..., ::2, :],
    "heads": lambda xp, x: xp.ascontiguousarray(xp.asarray(x).swapaxes(-3, -2)).swapaxes(-3, -2),
}
COPIED = {"every second", "backwards"}
COPIED_IN_STACKS = {"heads"}  # of which several axes have no single stride


def _inside(xp: Any, x: Any, where: Any) -> Any:
    width = [(0, 0)] * (x.ndim - 2) + [(s.start, -s.stop) for s in where[1:]]
    return xp.asarray(np.pad(x, width))[where]


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("lead", [(2,), (2, 3)], ids=str)
def test_layouts(gpu: Any, xp: Any, lead: tuple[int, ...], first: str) -> None:
    x = numbers((*lead, 4, 5), "f4")
    y = numbers((*lead, 5, 6), "f4", 1)
    a = LAYOUTS[first](xp, x)
    assert_array_equal(a.get(), x)
    for second, layout in LAYOUTS.items():
        b = layout(xp, y)
        gpu.reset()
        got = gemm.gemm(xp, a, b)
        copied = gpu.launches.total() - gpu.launches["cublasLtMatmul"]
        copies = COPIED | COPIED_IN_STACKS if len(lead) > 1 else COPIED
        assert copied == (first in copies) + (second in copies), second
        close(got, x.astype("f8") @ y, "f4")


@on_both
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_any_memory(xp: Any, layout: str, accumulate: bool) -> None:
    x = numbers((2, 3, 4, 5), "f4")
    y = numbers((2, 3, 5, 6), "f4", 1)
    out = LAYOUTS[layout](xp, np.ones((2, 3, 4, 6), "f4"))
    assert gemm.gemm(xp, xp.asarray(x), xp.asarray(y), out, accumulate) is out
    close(out, x.astype("f8") @ y + accumulate, "f4")


@on_both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
def test_views_of_a_bucket(xp: Any, offset: int, dtype: Any) -> None:
    """A gradient's place in a bucket may be aligned to its own size and no more."""
    bucket = xp.zeros(64, dtype)
    out = bucket[offset : offset + 20].reshape(4, 5)
    x = numbers((4, 3), dtype)
    y = numbers((3, 5), dtype, 1)
    for times in (1, 2):
        gemm.gemm(xp, xp.asarray(x), xp.asarray(y), out, times == 2)
        close(out, times * (x.astype("f8") @ y.astype("f8")), dtype)
    assert bucket[:offset].get().astype("f8").sum() == bucket[offset + 20 :].get().astype("f8").sum() == 0


@on_both
def test_a_plan_is_for_addresses_as_well_aligned(xp: Any) -> None:
    """The library's algorithm may count on it: the stand-in refuses an address that is less aligned."""
    room = xp.asarray(numbers((3, 64), "f4"))
    for first, second, third, bias in (
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (2, 4, 8, 0),
        (0, 0, 0, 3),
    ):
        a = room[0, first : first + 12].reshape(3, 4)
        b = room[1, second : second + 20].reshape(4, 5)
        out = xp.zeros(64, "f4")[third : third + 15].reshape(3, 5)
        vector = room[2, bias : bias + 5]
        expected = a.get().astype("f8") @ b.get()
        close(gemm.gemm(xp, a, b, out), expected, "f4")
        close(gemm.gemm(xp, a, b), expected, "f4")
        gemm.gemm(xp, a, b, out, False, "BIAS", vector)
        close(out, expected + vector.get(), "f4")


def test_a_product_without_an_algorithm_is_left_to_our_kernel(gpu: Any, xp: Any) -> None:
    gpu.cublaslt.lacks = lambda epilogue, dtype: True
    x = xp.ones((2, 2), "f4")
    assert gemm.gemm(xp, x, x, xp.empty((2, 2), "f4"), False, "RELU") is None
    gpu.cublaslt.MatmulAlgoGetHeuristic = lambda *_: cublaslt.NOT_SUPPORTED
    cublaslt_fake.forget()
    library = cublaslt.LtLibrary(gpu.cublaslt, "the stand-in")
    cublaslt._loaded[0] = library
    with pytest.warns(RuntimeWarning, match="a slow kernel multiplies instead: .*NOT_SUPPORTED"):
        assert gemm.gemm(xp, x, x) is None
    assert gemm.gemm(xp, x, x) is None  # and says so once


def test_the_steady_state_is_one_call(gpu: Any, xp: Any) -> None:
    x, y = xp.asarray(numbers((4, 100), "f4")), xp.asarray(numbers((100, 4), "f4"))
    gemm.gemm(xp, x, y)
    gpu.cublaslt.calls.clear()
    gpu.reset()
    for _ in range(3):
        gemm.gemm(xp, x, y)
    assert gpu.cublaslt.calls == {"cublasLtMatmul": 3}
    assert gpu.mallocs == gpu.synchronizations.total() == 0


def test_every_stream_has_scratch_memory_of_its_own(gpu: Any, xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "WORKSPACES", 3)
    x, y = xp.ones((4, 100), "f4"), xp.ones((100, 4), "f4")
    gemm.gemm(xp, x, y)
    with xp.cuda.Stream():
        gemm.gemm(xp, x, y)
    assert len(gemm._workspaces) == 2
    for _ in range(2 * gemm.WORKSPACES):
        with xp.cuda.Stream():
            gemm.gemm(xp, x, y)
    assert len(gemm._workspaces) == gemm.WORKSPACES
    graph = capture.Capture(lambda: None)
    with capture.inside(graph):
        for _ in range(2):
            gemm.gemm(xp, x, y)
    assert len(gemm._workspaces) == gemm.WORKSPACES
    assert [each.nbytes for each in graph.kept] == [32 << 20]


@pytest.fixture
def tf32() -> Iterator[None]:
    precision.choose("high")
    yield
    precision.choose("highest")


@on_both
def test_float32_is_exact_unless_tf32_is_allowed(xp: Any, tf32: None) -> None:
    x = np.full((1, 1), 1 + 2**-12, "f4")
    one = xp.ones((1, 1), "f4")
    assert gemm.gemm(xp, xp.asarray(x), one).item() == 1
    precision.choose("highest")
    assert gemm.gemm(xp, xp.asarray(x), one).item() == x.item()
    precision.choose("medium")
    assert gemm.gemm(xp, xp.asarray(x), one).item() == 1
    assert gemm.gemm(xp, xp.asarray(x, "f8"), one.astype("f8")).item() == x.item()


@on_both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 5, 130])
def test_epilogues_forward_and_backward(gpu: Any, xp: Any, n: int, dtype: Any) -> None:
    m, k, p = 6, 4, 3
    x = numbers((m, k), dtype)
    w = numbers((n, k), dtype, 1)
    b = numbers((n,), dtype, 2)
    g, v = numbers((m, p), dtype, 3), numbers((p, n), dtype, 4)
    gx, gw, gb, gg, gv = (xp.asarray(each) for each in (x, w, b, g, v))

    def fused(expected: Any, a: Any, b: Any, epilogue: str, *rest: Any) -> bool:
        out = xp.empty(expected.shape, dtype)
        if gemm.gemm(xp, a, b, out, False, epilogue, *rest) is None:
            assert isinstance(gpu, Real), "the stand-in has all of them"
            return False
        close(out, expected, dtype)
        return True

    before = x.astype("f8") @ w.T.astype("f8") + b.astype("f8")
    product = g.astype("f8") @ v.astype("f8")
    fused(before, gx, gw.T, "BIAS", gb)
    for name, act, slope in (
        ("RELU", np.maximum(before, 0), before > 0),
        ("GELU", cublaslt_fake.gelu(before), cublaslt_fake.gelu_slope(before)),
    ):
        fused(act, gx, gw.T, f"{name}_BIAS", gb)
        lead = -(-n // 128) * 128 if name == "RELU" else -(-n // 8) * 8
        aux = xp.empty((m, lead // 8), "u1") if name == "RELU" else xp.empty((m, lead), dtype)
        sums = xp.empty(n, dtype)
        if fused(act, gx, gw.T, f"{name}_AUX_BIAS", gb, aux, lead) and fused(
            product * slope, gg, gv, f"D{name}_BGRAD", sums, aux, lead
        ):
            close(sums, (product * slope).sum(0), dtype)
    sums = xp.empty(p, dtype)
    if fused(g.T.astype("f8") @ x.astype("f8"), gg.T, gx, "BGRADB", sums):
        close(sums, g.astype("f8").sum(0), dtype)
