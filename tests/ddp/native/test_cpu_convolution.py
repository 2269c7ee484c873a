"""Convolution by kernels gives the numbers of the formula in float64, in every way, at odd sizes and on any threads."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from threadpoolctl import threadpool_limits

import ddp
from collectives.native import builds
from ddp import _native
from ddp.backends import native as available
from ddp.ops import convolution
from ddp.ops.convolution import Shape, Window

pytestmark = pytest.mark.skipif(not available.is_available(), reason=available.why_not())
if available.is_available():
    from ddp._native import cpu_convolution as native

KERNELS = {
    "CONVOLVE": "direct",
    "CONVOLVE_FILTERS": "direct",
    "DEPTHWISE": "depthwise",
    "WINOGRAD": "winograd",
    "WINOGRAD_FILTERS": "winograd",
}
ONE, TWO = (1, 1), (2, 2)

CASES: list[tuple[Any, ...]] = [
    # way, (n, groups, channels, filters), (image, kernel, stride, padding, dilation)
    ("winograd", (3, 1, 16, 16), ((8, 8), (3, 3), ONE, ONE, ONE)),
    ("winograd", (2, 1, 17, 41), ((7, 13), (3, 3), ONE, (0, 2), ONE)),
    ("winograd", (1, 1, 35, 16), ((1, 2), (3, 3), ONE, TWO, ONE)),
    ("winograd", (2, 1, 16, 24), ((5, 151), (3, 3), ONE, ONE, ONE)),
    ("winograd", (33, 1, 70, 80), ((6, 5), (3, 3), ONE, ONE, ONE)),
    ("winograd", (2, 1, 19, 33), ((6, 9), TWO, ONE, (1, 0), ONE)),
    ("winograd", (2, 1, 16, 48), ((8, 8), (4, 4), TWO, ONE, ONE)),
    ("winograd", (3, 1, 48, 32), ((9, 11), (4, 4), TWO, (2, 0), ONE)),
    ("winograd", (1, 1, 16, 16), ((4, 301), (4, 4), TWO, TWO, ONE)),
    ("winograd", (33, 1, 32, 80), ((6, 5), (4, 4), TWO, (0, 1), ONE)),
    ("direct", (2, 1, 3, 7), ((9, 11), (3, 3), ONE, ONE, ONE)),
    ("direct", (2, 1, 1, 10), ((13, 26), (7, 7), TWO, (3, 3), ONE)),
    ("direct", (2, 1, 6, 5), ((8, 17), (4, 4), TWO, ONE, ONE)),
    ("direct", (2, 1, 4, 3), ((12, 29), (2, 5), (4, 3), (1, 4), (2, 1))),
    ("direct", (1, 1, 2, 2), ((5, 6), (3, 2), (1, 2), (5, 7), (1, 3))),
    ("direct", (1, 1, 20, 4), ((300, 70), (5, 5), ONE, TWO, ONE)),  # several bands of an image
    ("direct", (2, 1, 40, 50), ((6, 17), (3, 3), TWO, ONE, ONE)),  # the gradient of so many filters by the formula
    ("direct", (2, 3, 5, 4), ((7, 8), (3, 3), ONE, ONE, ONE)),
    ("depthwise", (3, 7, 1, 1), ((4, 4), (3, 3), ONE, ONE, ONE)),
    ("depthwise", (5, 83, 1, 1), ((9, 6), (5, 2), TWO, (2, 0), ONE)),
    ("depthwise", (2, 64, 1, 1), ((8, 8), (3, 4), (1, 3), (3, 2), (2, 1))),
    ("direct", (2, 19, 1, 1), ((15, 33), (5, 5), TWO, TWO, ONE)),
    ("depthwise", (2, 4, 1, 1), ((9, 10), (7, 7), ONE, (3, 3), (2, 1))),
    ("direct", (2, 4, 1, 1), ((19, 10), (7, 7), ONE, (3, 3), (2, 1))),
    ("direct", (2, 4, 1, 3), ((9, 10), (3, 3), ONE, ONE, ONE)),
    ("product", (3, 1, 5, 9), ((8, 9), ONE, ONE, (0, 0), ONE)),
    ("whole", (3, 1, 5, 9), ((4, 3), (4, 3), TWO, (0, 0), ONE)),
    ("columns", (2, 1, 9, 20), ((8, 8), (3, 3), TWO, ONE, ONE)),
    ("columns", (3, 1, 5, 9), ((3, 4), ONE, ONE, (0, 0), ONE)),
    ("columns", (2, 2, 5, 9), ((8, 9), ONE, TWO, (0, 0), ONE)),
    ("columns", (2, 1, 3, 4), ((10, 15), (5, 5), (5, 5), (0, 0), ONE)),
]


def arrays_of(sizes: tuple[int, ...], geometry: tuple[Any, ...]) -> tuple[Shape, list[Any]]:
    """The shape, and x, w, b and g in float32."""
    n, groups, channels, filters = sizes
    window = Window(*geometry)
    rng = np.random.default_rng(0)
    shapes = (
        (n, groups * channels, *window.image),
        (groups * filters, channels, *window.kernel),
        (groups * filters,),
        (n, groups * filters, *window.out),
    )
    return Shape(*sizes, window), [rng.standard_normal(shape).astype("float32") for shape in shapes]


def results(shape: Shape, x: Any, w: Any, b: Any, g: Any) -> list[Any]:
    return [
        convolution.correlate(np, x, w, b, shape),
        convolution.correlate(np, x, w, None, shape),
        *convolution.adjoint(np, g, w, x, shape),
    ]


def check(shape: Shape, x: Any, w: Any, b: Any, g: Any) -> None:
    expected = results(shape, *[each.astype("float64") for each in (x, w, b, g)])
    for got, right in zip(results(shape, x, w, b, g), expected, strict=True):
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        assert_allclose(got, right, rtol=0, atol=3e-6 * max(1.0, np.abs(right).max()))


@pytest.mark.parametrize(("way", "sizes", "geometry"), CASES, ids=str)
def test_numbers(way: str, sizes: Any, geometry: Any) -> None:
    shape, (x, w, b, g) = arrays_of(sizes, geometry)
    assert native.way(shape) == way
    check(shape, x, w, b, g)
    gaps = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), np.float32)[..., ::2]
    gaps[...] = x
    check(shape, gaps, np.asfortranarray(w), b, np.asfortranarray(g))


@pytest.mark.parametrize(("size", "stride", "padding"), [(4, 2, 2), (3, 1, 2), (2, 1, 1)])
def test_images_without_width(size: int, stride: int, padding: int) -> None:
    x = ddp.zeros(2, 16, 4, 0, requires_grad=True)
    w = ddp.ones(16, 16, size, size, requires_grad=True)
    ddp.nn.functional.conv2d(x, w, None, stride=stride, padding=(1, padding)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert w.grad is not None
    assert not w.grad.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """One that writes nothing is found out: no formula computes beside it."""

    def idle(*arguments: Any) -> int:
        return 1

    _, sizes, geometry = next(case for case in CASES if case[0] == KERNELS[kernel])
    shape, arrays = arrays_of(sizes, geometry)
    check(shape, *arrays)
    monkeypatch.setattr(native, kernel, idle)
    with pytest.raises(AssertionError):
        check(shape, *arrays)


def test_the_formula_computes_where_a_kernel_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS:
        monkeypatch.setattr(native, kernel, lambda *arguments: 0)
    for way in set(KERNELS.values()):
        _, sizes, geometry = next(case for case in CASES if case[0] == way)
        shape, arrays = arrays_of(sizes, geometry)
        check(shape, *arrays)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("channels", "kernel", "groups"), [(16, 3, 1), (4, 3, 1), (4, 3, 4), (4, 1, 1)])
def test_gradients_of_gradients_are_by_kernels(
    monkeypatch: pytest.MonkeyPatch, channels: int, kernel: int, groups: int, transposed: bool
) -> None:
    convolve = ddp.nn.functional.conv_transpose2d if transposed else ddp.nn.functional.conv2d
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(each) for each in ((2, channels, 9, 8), (channels, channels // groups, kernel, kernel))
    ]

    def gradients(dtype: str) -> list[Any]:
        x, w = (ddp.from_numpy(array.astype(dtype)).requires_grad_() for array in arrays)
        z = convolve(x, w, padding=kernel // 2, groups=groups)
        first = ddp.autograd.grad((z**2).sum(), (x, w), create_graph=True)
        second = ddp.autograd.grad(sum((each**2).sum() for each in first), (x, w))
        return [each.detach().numpy() for each in (*first, *second)]

    expected = gradients("float64")
    for function in (convolution.correlate, convolution.adjoint):
        monkeypatch.setattr(function, "__wrapped__", None)  # no formula computes beside the kernels
    for got, right in zip(gradients("float32"), expected, strict=True):
        assert_allclose(got, right, rtol=0, atol=3e-6 * np.abs(right).max())


def test_transposed_images_may_be_larger_than_what_their_positions_see() -> None:
    for stride, kernel in ((2, 3), (3, 2), (1, 3)):
        out = tuple((n - kernel) // stride + 1 for n in (16, 19))
        window = Window((16, 19), (kernel, kernel), (stride, stride), (0, 0), (1, 1), (out[0] - 1, out[1]))
        rng = np.random.default_rng(0)
        shape = Shape(2, 1, 16, 17, window)
        sizes = (2, 16, 16, 19), (17, 16, kernel, kernel), (17,), (2, 17, *window.out)
        check(shape, *[rng.standard_normal(size).astype("float32") for size in sizes])


def test_infinities_stay_within_the_tiles_that_read_them() -> None:
    shape, (x, w, b, _) = arrays_of((1, 1, 16, 16), ((12, 12), (3, 3), ONE, ONE, ONE))
    x[0, 3, 5, 5] = np.inf
    with np.errstate(invalid="ignore"):
        z = convolution.correlate(np, x, w, b, shape)
    far = np.ones((12, 12), bool)
    far[4:8, 4:8] = False  # the tiles of two by two that hold a result that reads it
    assert np.isfinite(z[..., far]).all()
    assert not np.isfinite(z[..., 4:7, 4:7]).any()


def test_any_number_of_threads_gives_the_same_bits() -> None:
    result = []
    for count in (1, 2, 3):
        with threadpool_limits(count, user_api="blas"):
            if _native.library.count_threads(1 << 20) != count:
                pytest.skip("NumPy's products come from another library than OpenBLAS")
            result.append([each for _, sizes, geometry in LARGE for each in results_of(sizes, geometry)])
    for others in result[1:]:
        for got, right in zip(others, result[0], strict=True):
            assert_array_equal(got, right)


def test_all_builds_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [ctypes.CDLL(str(path)) for path in builds(Path(_native.__file__).parent, "kernels")]
    if len(libraries) < 2:
        pytest.skip("this CPU runs one build alone")
    result = []
    for library in libraries:
        for name in KERNELS:
            function = getattr(library, f"{name.lower()}_f32")
            function.argtypes = getattr(native, name).argtypes
            monkeypatch.setattr(native, name, function)
        result.append([each for _, sizes, geometry in LARGE for each in results_of(sizes, geometry)])
    for got, right in zip(result[1], result[0], strict=True):
        assert_array_equal(got, right)


# Long enough to be shared among threads, and of no round size.
LARGE: list[tuple[Any, ...]] = [
    ("winograd", (5, 1, 37, 41), ((19, 23), (3, 3), ONE, ONE, ONE)),
    ("direct", (5, 1, 5, 31), ((41, 37), (3, 3), TWO, ONE, ONE)),
    ("direct", (3, 13, 1, 1), ((41, 37), (5, 5), ONE, TWO, ONE)),
    ("depthwise", (7, 203, 1, 1), ((9, 7), (3, 3), ONE, ONE, ONE)),
]


def results_of(sizes: tuple[int, ...], geometry: tuple[Any, ...]) -> list[Any]:
    shape, (x, w, b, g) = arrays_of(sizes, geometry)
    return results(shape, x, w, b, g)
