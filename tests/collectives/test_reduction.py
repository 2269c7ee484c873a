"""What a reduction means: every dtype and op against exact arithmetic, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator, world
from collectives.reduction import ReduceOp, check_scale, finish, wire_dtype

Run = Callable[[Callable[[Communicator], Any]], list[Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(code) for code in np.typecodes["AllInteger"]]
HALVES = [np.dtype(np.float16), BFLOAT16]
FLOATS = [*HALVES, *(np.dtype(code) for code in "fdg")]
COMPLEX = [np.dtype(code) for code in "FDG"]
SWAPPED = [np.dtype(name) for name in (">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16")]
SWAPPED += [BFLOAT16.newbyteorder(">")]
OPS = ["sum", "mean", "prod", "max", "min"]


def ids(value: Any) -> str:
    return str(value)


def drawn(dtype: np.dtype[Any], rank: int) -> Any:
    """(7, 11) objects: small whole numbers, and an integer's extremes. Every rank can draw what another one has.

    Long enough for the vector units, whose sums are not always those of the rest.
    """
    rng = np.random.default_rng(rank)
    x = rng.integers(0 if dtype.kind == "u" else -4, 5, (7, 11)).astype(object)
    if dtype.kind == "c":
        x = x + 1j * rng.integers(-4, 5, (7, 11))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        x[:3] = np.array([int(limits.max), int(limits.min), int(limits.max) - rank], object)[:, None]
    return x


def exact(op: str, dtype: np.dtype[Any], values: list[Any]) -> Any:
    """The reduction of Python's numbers, integers wrapped to the dtype's bits."""
    whole = dtype.kind in "iu"
    if op in ("max", "min"):
        return max(values) if op == "max" else min(values)
    if op in ("sum", "prod"):
        total = sum(values) if op == "sum" else functools.reduce(lambda a, b: a * b, values)
        return wrapped(total, dtype) if whole else total
    if not whole:
        return sum(values) / len(values)
    total = wrapped(sum(values), np.dtype(f"{dtype.kind if dtype.itemsize == 8 else 'i'}8"))
    return abs(total) // len(values) * (-1 if total < 0 else 1)


def wrapped(value: int, dtype: np.dtype[Any]) -> int:
    limits = np.iinfo(dtype)
    return (value - int(limits.min)) % (1 << limits.bits) + int(limits.min)


class Reductions:
    """A backend's tests inherit this and provide `run`, which calls a function on every rank."""

    @pytest.mark.parametrize("op", OPS)
    @pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *SWAPPED, *COMPLEX], ids=ids)
    def test_every_dtype_and_op(self, run: Run, dtype: np.dtype[Any], op: str) -> None:
        def check(comm: Communicator) -> None:
            # Not from objects at once: ml_dtypes would forget the byte order.
            plain = {"c": np.complex128, "f": np.float64, "V": np.float32}.get(dtype.kind, dtype)
            half = dtype.itemsize == 2 and dtype.kind not in "iu"
            x = drawn(dtype, comm.rank).astype(plain).astype(dtype)
            before = x.copy()
            if dtype.kind == "c" and op in ("max", "min"):
                with pytest.raises(collectives.DtypeError, match=f"{op} of .* it has sum, mean, prod"):
                    comm.all_reduce(x, op)
                return
            everyones = np.stack([drawn(dtype, rank) for rank in range(comm.size)])
            expected = np.empty(x.shape, object)
            for at in np.ndindex(x.shape):
                expected[at] = exact(op, dtype, list(everyones[(slice(None), *at)]))
            whole = comm.all_reduce(x, op)
            on_root = comm.reduce(x, op, comm.size - 1)
            for y in (whole,) if on_root is None else (whole, on_root):
                assert y.dtype == dtype
                if half:
                    assert_array_equal(y, expected.astype(np.float32).astype(dtype))
                elif op == "mean" and dtype.kind in "fc":  # 1 / 3 is rounded by each its own way
                    np.testing.assert_allclose(y, expected.astype(plain), rtol=2 * max(np.finfo(dtype).eps, 1e-16))
                else:
                    assert_array_equal(y, expected)
            assert_array_equal(x, before)

        run(check)

    @pytest.mark.parametrize("dtype", HALVES, ids=ids)
    def test_halves_are_summed_in_float32_and_rounded_once(self, run: Run, dtype: np.dtype[Any]) -> None:
        def check(comm: Communicator) -> None:
            # In the dtype itself, large + 1 is large again.
            large = 2.0 ** (np.finfo(np.float16).nmant + 1) if dtype == np.float16 else 2.0**8
            x = np.full((2, 3), large if comm.rank == 0 else 1.0).astype(dtype)
            total = np.float32(large + comm.size - 1)
            assert_array_equal(comm.all_reduce(x), np.full((2, 3), total).astype(dtype))
            assert_array_equal(
                comm.all_reduce(x, "mean", scale=3.0), np.full((2, 3), total / comm.size * 3).astype(dtype)
            )
            y = x.copy()
            assert comm.all_reduce(y, out=y) is y
            assert_array_equal(y, np.full((2, 3), total).astype(dtype))
            strided = np.zeros((2, 6), dtype)[:, ::2]
            assert comm.all_reduce(x.T, out=strided.T[:, :]).shape == (3, 2)
            assert_array_equal(strided, np.full((2, 3), total).astype(dtype))

        run(check)

    @pytest.mark.filterwarnings("ignore:invalid value")
    @pytest.mark.parametrize("dtype", FLOATS, ids=ids)
    def test_nan_on_one_rank_is_the_max_and_the_min_of_all(self, run: Run, dtype: np.dtype[Any]) -> None:
        def check(comm: Communicator) -> None:
            for lost in range(comm.size):
                x = np.array([np.nan if comm.rank == lost else 1, comm.rank, -np.inf]).astype(dtype)
                for op, other in (("max", comm.size - 1), ("min", 0)):
                    expected = np.array([np.nan, other, -np.inf]).astype(dtype)
                    assert_array_equal(comm.all_reduce(x, op).astype(np.float64), expected.astype(np.float64))

        run(check)


class TestSingle(Reductions):
    @pytest.fixture
    def run(self) -> Run:
        from collectives.backends.single import SingleTransport

        return lambda fn: [fn(Communicator(SingleTransport(), timeout=20))]


class TestThreads(Reductions):
    @pytest.fixture(params=[2, 3])
    def run(self, request: pytest.FixtureRequest) -> Run:
        return functools.partial(collectives.run_threads, size=request.param, timeout=20)


if world.promised() is not None:  # inside the job that the next test starts

    class TestMPI(Reductions):
        @pytest.fixture
        def run(self) -> Run:
            comm = collectives.init("mpi", timeout=20)
            return lambda fn: [fn(comm)]


@pytest.mark.mpi
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_reductions_mean_the_same_over_mpi(hold_over_mpi: Callable[..., None], size: int) -> None:
    hold_over_mpi(__file__, "TestMPI", size)


# The rules themselves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "op", "why"),
    [
        ("?", "sum", "it has max, min"),
        ("c8", "max", "it has sum, mean, prod"),
        ("O", "sum", "it cannot be reduced"),
        ("float8_e4m3fn", "max", "it cannot be reduced"),
    ],
)
def test_pairs_without_meaning(dtype: str, op: str, why: str) -> None:
    with pytest.raises(collectives.DtypeError, match=why):
        wire_dtype(np.dtype(getattr(ml_dtypes, dtype, dtype)), ReduceOp(op))


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8", "c8"])
def test_scales_are_real_numbers(dtype: str) -> None:
    for good in (0.5, 2, Fraction(1, 2), np.float32(0.5), np.array(0.5), BFLOAT16.type(0.5), lambda: 0.5):
        check_scale(np.dtype(dtype), good)
    for bad in ("0.5", 1j, np.ones(3), [0.5], np.array("a")):
        with pytest.raises(collectives.ArgumentError, match="scale should be a real number"):
            check_scale(np.dtype(dtype), bad)
    with pytest.raises(collectives.DtypeError, match="scale needs a floating or complex dtype"):
        check_scale(np.dtype("i4"), 0.5)


def test_a_scale_is_applied_in_the_dtype_of_the_array_whatever_its_own() -> None:
    answers = []
    for scale in (0.1, np.float64(0.1), np.array(0.1)):
        total = np.linspace(0, 1, 1001, dtype=np.float32)
        finish(total, ReduceOp.SUM, 2, scale)  # type: ignore[arg-type]  # NumPy's scalars and 0-d arrays are taken too
        answers.append(total.tobytes())
    assert len(set(answers)) == 1


def test_a_mean_is_divided_not_multiplied_unless_that_is_exact() -> None:
    for size in range(2, 70):
        total = np.arange(100, dtype=np.float32) * np.float32(0.1)
        expected = total / np.float32(size)
        finish(total, ReduceOp.MEAN, size, None)
        assert_array_equal(total, expected)
