"""Generated kernels: how they walk memory, what they give for every dtype and special value, how often they launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddp
from ddp._device import CPU
from ddp.ops.cuda import pointwise_plan
from ddp.ops.cuda.direct import write
from ddp.ops.cuda.folding import PRODUCT, Reducing
from ddp.ops.cuda.pointwise import KERNELS, Elementwise
from ddp.ops.cuda.pointwise_plan import Walk, collapsed, dense, small, team, vectors
from ddp.ops.cuda.reducing import SUM
from tests.ddp.cuda import emulation

needs_compiler = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
xp = emulation.cupy


def test_neighbours_in_memory_are_one_dimension() -> None:
    assert collapsed((2, 3, 4), [(12, 4, 1), (12, 4, 1)]) == Walk((24,), ((1,), (1,)))
    assert collapsed((2, 3, 4), [(0, 4, 1), (12, 4, 1)]) == Walk((2, 12), ((0, 1), (12, 1)))
    assert collapsed((2, 3, 4), [(3, 1, 0), (12, 4, 1)]) == Walk((6, 4), ((1, 0), (4, 1)))
    assert collapsed((), [(), ()]) == Walk((1,), ((0,), (0,)))
    # Channels last: the dimensions go in the order of memory.
    assert collapsed((2, 3, 4, 5), [(60, 1, 15, 3), (60, 1, 15, 3)]) == Walk((120,), ((1,), (1,)))


def test_packs_need_steps_of_one_and_rows_of_whole_packs() -> None:
    assert vectors(Walk((24,), ((1,), (1,))), 1, 4)
    assert vectors(Walk((25,), ((0,), (1,))), 1, 4)  # what is left over comes one by one
    assert not vectors(Walk((24,), ((1,), (0,))), 1, 4)  # a result
    assert vectors(Walk((6, 4), ((1, 0), (4, 1))), 1, 4) is False  # whose steps are no whole packs
    assert vectors(Walk((6, 8), ((0, 1), (8, 1))), 1, 4)
    assert not vectors(Walk((6, 6), ((0, 1), (6, 1))), 1, 4)


def test_offsets_past_32_bits_are_noticed() -> None:
    assert small(Walk((1 << 30,), ((1,), (1,))))
    assert not small(Walk((1 << 31,), ((1,), (1,))))
    assert not small(Walk((3, 5), ((1 << 30, 1), (5, 1))))
    assert not small(Walk((5,), ((-1,), (1,))))


def test_the_order_of_memory_is_found() -> None:
    assert dense((2, 3, 4, 5), (60, 1, 15, 3)) == (0, 2, 3, 1)
    assert dense((2, 3), (6, 2)) is None


def test_a_reduction_is_cut_by_sizes_alone() -> None:
    assert team(1, 1_000_000, True) == (True, 488)
    assert team(50_000, 16, True) == (False, 1)
    assert team(768, 8192, False) == (False, 85)
    assert team(10, 100, False) == (True, 1)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "xp", xp)


def draws() -> Iterator[tuple[Any, Any]]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype("f4")

    yield draw(3, 4), draw(3, 4)
    yield draw(3, 16), draw(16)
    yield draw(3, 16), draw(3, 1)
    yield draw(7, 5).T, draw(5, 7)
    yield draw(2, 4, 4, 3).transpose(0, 3, 1, 2), draw(2, 4, 4, 3).transpose(0, 3, 1, 2)
    yield draw(5, 1, 4), draw(3, 1)
    yield draw(100)[1:], draw(100)[:-1]  # addresses that hold no packs
    yield draw(50)[::-1], draw(50)
    yield draw(3, 8)[:, ::2], draw(4)
    yield np.broadcast_to(draw(4), (3, 4)), draw(3, 4)
    yield draw(0, 3), draw(3)
    yield np.asarray(draw(1)[0]), np.asarray(draw(1)[0])
    yield draw(2, 1, 2, 1, 2, 1, 2, 1, 2, 2, 2)[::1, :, :, :, ::-1], draw(2, 2)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16, "int32", "bool"])
def test_any_memory(dtype: Any) -> None:
    kernel = KERNELS["mul"]
    assert isinstance(kernel, Elementwise)
    for x, y in draws():
        x, y = (np.asarray(np.multiply(each, 3)).astype(dtype, order="K") for each in (x, y))
        (got,) = kernel(xp, (x, y)) or ()
        np.testing.assert_array_equal(got, x * y)
    x = np.zeros((2, 4, 4, 3), dtype).transpose(0, 3, 1, 2)
    assert (kernel(xp, (x, x)) or ())[0].strides == x.strides  # channels last stay last


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((3, 4), (0,)), ((3, 4), (1,)), ((3, 4), (0, 1)), ((2, 3, 4), (1,)), ((2, 3, 4), (0, 2)), ((0, 3), (0,)),
        ((3, 0), (0,)), ((9000,), (0,)), ((2, 9000), (1,)), ((6000, 3), (0,)), ((100, 300), (0,)), ((4500, 4), (1,)),
        ((), ()),
    ],
)  # fmt: skip
def test_any_axes(shape: tuple[int, ...], axes: tuple[int, ...], dtype: Any) -> None:
    x = np.random.default_rng(1).standard_normal(shape)
    x = np.asarray(x).astype(dtype)
    for keepdims in (False, True):
        got = SUM(xp, (x,), axes, keepdims)
        expected = np.asarray(x.astype("f8").sum(axis=axes, keepdims=keepdims))
        assert got.dtype == x.dtype
        assert got.shape == expected.shape
        rounding = 2**-7 if x.dtype == BFLOAT16 else 1e-6
        np.testing.assert_allclose(got.astype("f8"), expected, rtol=rounding, atol=1e-4)


@needs_compiler
def test_a_sum_in_two_steps_ends_once() -> None:
    ended = Reducing("test_ended", ("x",), "v = x;", PRODUCT, end="v + more", numbers=("more",))
    x = np.ones((9000,), np.float32)
    x[7], x[8000] = 3, 5
    assert ended(xp, (x,), (0,), False, (0.5,)) == 15.5
    del KERNELS["test_ended"], KERNELS["test_ended_joined"]


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-40, 3e38, 0.5]
OF_TWO = {
    "add": lambda x, y: x + y,
    "div": lambda x, y: x / y,
    "floor": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": lambda x, y: x.fmod(y),
    "pow": lambda x, y: x**y,
    "maximum": lambda x, y: x.maximum(y),
    "fmin": lambda x, y: x.fmin(y),
    "less": lambda x, y: x < y,
    "not_equal": lambda x, y: x != y,
    "atan2": lambda x, y: x.atan2(y),
    "where": lambda x, y: ddp.where(x > 0, x, y),
}
OF_ONE = {
    "relu": lambda x: x.relu(),
    "sign": lambda x: x.sign(),
    "round": lambda x: x.round(),
    "sqrt": lambda x: x.sqrt(),
    "clamp": lambda x: x.clamp(-1, 2),
    "nan_to_num": lambda x: x.nan_to_num(),
    "amax": lambda x: x.amax(),
    "norm": lambda x: x[:6].norm(float("inf")),
    "int": lambda x: x.nan_to_num(0.0, 1.0, 1.0).clamp(-9, 9).int(),
    "bool": lambda x: x.bool(),
    "bfloat16": lambda x: x.bfloat16().float(),
}


def both(fn: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What NumPy gives, and what the kernels give."""
    expected = fn()._array
    with monkeypatch.context() as patch:
        patch.setattr(CPU, "xp", xp)
        got = fn()._array
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    return got, expected


@needs_compiler
@pytest.mark.parametrize("name", [*OF_TWO, *OF_ONE])
def test_special_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ddp.tensor(SPECIAL)
    fn = (lambda: OF_TWO[name](x[:, None], x)) if name in OF_TWO else (lambda: OF_ONE[name](x))
    got, expected = both(fn, monkeypatch)
    np.testing.assert_allclose(got.astype("f8"), expected.astype("f8"), rtol=1e-6)
    if name not in ("remainder", "atan2", "fmin"):  # which of two zeros is the lesser
        np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@needs_compiler
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_integers_at_their_ends(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = np.iinfo(dtype)
    x = ddp.from_numpy(np.array([info.min, info.min + 1, 0, 1, 3, 7, info.max - 1, info.max], dtype))
    y = ddp.from_numpy(np.array([1, 2, 3, 7, info.max], dtype))
    signed = [] if dtype == "uint8" else [lambda: x // -1, lambda: x % -3]
    for fn in (
        *(lambda: x[:, None] + y, lambda: x[:, None] * y, lambda: x[:, None] // y, lambda: x[:, None] % y),
        *(lambda: x[:, None].fmod(y), lambda: x[:, None].div(y, rounding_mode="trunc")),
        *(lambda: x.sum(), lambda: x < 3, lambda: x == 2**40, lambda: x.abs(), lambda: x + 1, lambda: x.float()),
        *signed,
    ):
        got, expected = both(fn, monkeypatch)
        np.testing.assert_array_equal(got, expected)


@needs_compiler
def test_a_number_that_integers_do_not_hold_is_refused(emulated: None) -> None:
    with pytest.raises(ddp.errors.ArgumentError):
        ddp.ones(3, dtype=ddp.uint8) + 300
    with pytest.raises(ddp.errors.ArgumentError):
        ddp.ones(3, dtype=ddp.uint8).add_(-1)


class Counted(type(xp)):  # type: ignore[misc]  # a class that the emulator has
    """The emulator, which writes down its launches."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        log = self.log

        class RawKernel(emulation.RawKernel):
            def __call__(self, *given: Any) -> None:
                log.append(self._name)
                super().__call__(*given)

        self.RawKernel = RawKernel


LAUNCHES = {
    "mul": (lambda x, y: x * y, ["ddp_mul"], ["ddp_mul_dx_dy"]),
    "mul by a row": (lambda x, y: x * y[0], ["ddp_mul"], ["ddp_mul_sum_dy_across", "ddp_mul_dx"]),
    "by a number": (lambda x, y: x * 2.0, ["ddp_mul"], ["ddp_mul_dx"]),
    "add": (lambda x, y: x + y, ["ddp_add"], []),
    "silu": (lambda x, y: ddp.nn.functional.silu(x), ["ddp_silu"], ["ddp_silu_dx"]),
    "sum": (lambda x, y: x.sum(-1), ["ddp_sum_along"], []),
    "mean": (lambda x, y: x.mean(), ["ddp_mean_along"], ["ddp_scaled"]),
    "cast": (lambda x, y: x.double(), ["ddp_cast"], ["ddp_cast"]),
}


@needs_compiler
@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16])
@pytest.mark.parametrize("name", LAUNCHES)
def test_an_op_is_one_launch(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    fn, forward, backward = LAUNCHES[name]
    x, y = (ddp.from_numpy(np.ones((3, 40), np.float32)).to(dtype).requires_grad_() for _ in range(2))
    monkeypatch.setattr(CPU, "xp", counted)
    z = fn(x, y)
    assert counted.log == forward
    counted.log.clear()
    g = ddp.from_numpy(np.ones(z.shape, np.float32)).to(z.dtype)
    counted.log.clear()
    z.backward(g)
    assert counted.log == backward


@needs_compiler
def test_writes_in_place() -> None:
    x = np.arange(6, dtype=np.float32)
    assert write(xp, "add", x, np.ones(6, np.float32))
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    assert write(xp, "multiply", x, 2.0)
    assert x.tolist() == [2, 4, 6, 8, 10, 12]
    assert not write(xp, "add", x[1:], x[:-1])  # which would read what it wrote
    assert not write(xp, "add", np.broadcast_to(np.float32(0), (3,)), 1.0)
    half = np.ones(4, BFLOAT16)
    assert write(xp, "subtract", half, np.full(4, 0.25, np.float32))
    assert half.astype("f4").tolist() == [0.75] * 4


def test_steps() -> None:
    assert pointwise_plan.row_major((2, 3, 4)) == (12, 4, 1)
    assert pointwise_plan.aligned((2, 3, 4), (3, 1), (1, 1)) == (0, 1, 0)
