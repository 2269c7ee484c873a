"""The semantics of host arrays, on device arrays: whatever carries them, the answer is that of the same host call.

Over host memory the answer has the same bits. Over NCCL its mean and its scaled sums may be rounded once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import collectives
from tests.collectives.backends.device.conftest import Rig
from tests.collectives.backends.device.fake_nccl import FakeLibrary

TRANSPORTS = {"staged": None, "nccl": FakeLibrary()}
DTYPES = (
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64, np.complex128, np.bool_),
    *(np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
)


class Ranks:
    """Calls a function on every rank. exact: the answer must have the bits that it has on the host"""

    def __init__(self, made: Rig, exact: bool) -> None:
        self.made = made
        self.exact = exact

    def __call__(self, fn: Callable[[Any, Any], None]) -> None:
        self.made.run(fn)


@pytest.fixture(
    params=[(transport, size) for transport in TRANSPORTS for size in (1, 2, 3)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def ranks(request: pytest.FixtureRequest, rig: Callable[..., Rig]) -> Ranks:
    transport, size = request.param
    return Ranks(rig(size, TRANSPORTS[transport], seed=size), exact=not isinstance(TRANSPORTS[transport], FakeLibrary))


def same(on_device: Any, on_host: Any, close: bool = False) -> None:
    assert (on_device is None) == (on_host is None)
    if on_host is not None:
        got = on_device.get()
        assert (got.dtype, got.shape) == (on_host.dtype, on_host.shape)
        if close:
            assert_allclose(got.astype(complex), on_host.astype(complex), rtol=4 * np.finfo(np.float32).eps)
        else:
            assert_array_equal(got, on_host)


def values(shape: tuple[int, ...], dtype: Any, rank: int) -> Any:
    count = int(np.prod(shape))
    return (np.arange(1, count + 1) % 7 + 2 * rank).reshape(shape).astype(dtype)


# Every dtype is tried with three ranks; with fewer, those that stand for the others, unless --long is given.
FEW = (np.float32, np.float16, np.complex64, np.bool_, np.int16)


def test_reductions(ranks: Ranks, count: Callable[[int, int], int]) -> None:
    def check(comm: Any, cupy: Any) -> None:
        for dtype in DTYPES if comm.size == 3 or count(0, 1) else FEW:
            reduce(comm, cupy, dtype)

    def reduce(comm: Any, cupy: Any, dtype: Any) -> None:
        host = values((7, 5), dtype, comm.rank)
        x = cupy.asarray(host)
        for op in collectives.ReduceOp:
            close = op is collectives.ReduceOp.MEAN and not ranks.exact
            try:
                expected = comm.all_reduce(host, op)
            except collectives.DtypeError:
                with pytest.raises(collectives.DtypeError):
                    comm.all_reduce(x, op)
                continue
            same(comm.all_reduce(x, op), expected, close)
            same(comm.reduce(x, op, comm.size - 1), comm.reduce(host, op, comm.size - 1), close)
            same(comm.reduce_scatter(x, op), comm.reduce_scatter(host, op), close)
            uneven = [0] * (comm.size - 1) + [7]
            same(comm.reduce_scatter(x, op, lengths=uneven), comm.reduce_scatter(host, op, lengths=uneven), close)
        assert_array_equal(x.get(), host)

    ranks(check)


def test_scales(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.complex64):
            scaled(comm, cupy, dtype)

    def scaled(comm: Any, cupy: Any, dtype: Any) -> None:
        host = values((6,), dtype, comm.rank)
        x = cupy.asarray(host)
        late = cupy.asarray(np.array(0.25))
        for op in ("sum", "mean"):
            for scale in (0.5, 1.0, np.float32(0.5), lambda: 0.5):
                same(comm.all_reduce(x, op, scale=scale), comm.all_reduce(host, op, scale=scale), close=not ranks.exact)
            # A 0-d array on the device is never looked at by the host.
            same(comm.all_reduce(x, op, scale=lambda: late), comm.all_reduce(host, op, scale=0.25), not ranks.exact)
        with pytest.raises(collectives.DtypeError, match="scale needs a floating"):
            comm.all_reduce(cupy.asarray(np.arange(3)), scale=0.5)

    ranks(check)


def test_nan_wins_max_and_min_on_every_rank(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        for dtype, lost in itertools.product((np.float16, np.float32, np.float64), range(comm.size)):
            host = np.array([np.nan if comm.rank == lost else 1, comm.rank], dtype)
            x = cupy.asarray(host)
            for op, other in (("max", comm.size - 1), ("min", 0)):
                assert_array_equal(comm.all_reduce(x, op).get(), np.array([np.nan, other], dtype))
                on_root = comm.reduce(x, op)
                assert on_root is None or np.isnan(on_root.get()[0])
                rows = cupy.asarray(np.tile(host, (comm.size, 1)))
                assert_array_equal(comm.reduce_scatter(rows, op).get(), np.array([[np.nan, other]], dtype))
            same(comm.all_reduce(x, "max", out=x), np.array([np.nan, comm.size - 1], dtype))

    ranks(check)


def test_shapes(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        for shape in ((), (0,), (0, 3), (1,), (2, 0, 3), (40, 3)):
            move(comm, cupy, shape)

    def move(comm: Any, cupy: Any, shape: tuple[int, ...]) -> None:
        host = np.ones(shape, np.float32)
        x = cupy.asarray(host)
        for call in (
            lambda y: comm.all_reduce(y),
            lambda y: comm.reduce(y),
            lambda y: comm.broadcast(y),
            lambda y: comm.all_gather(y),
            lambda y: comm.gather(y, lengths="equal"),
        ):
            same(call(x), call(host.copy()))
        if shape:
            same(comm.reduce_scatter(x), comm.reduce_scatter(host))
            same(comm.all_to_all(x), comm.all_to_all(host))
            same(comm.scatter(x), comm.scatter(host))
        else:
            with pytest.raises(collectives.ArgumentError, match="0-d"):
                comm.all_to_all(x)

    ranks(check)


def test_strided_and_fortran_input(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        base = np.arange(24.0).reshape(4, 6) + comm.rank
        for cut in (lambda a: a[::2, ::-3], lambda a: a.T):
            x, host = cut(cupy.asarray(base)), cut(base)
            y = comm.all_reduce(x)
            assert y.flags.c_contiguous
            same(y, comm.all_reduce(host))
            same(comm.all_gather(x), comm.all_gather(host))
            same(comm.all_to_all(x), comm.all_to_all(host))
            same(comm.reduce_scatter(x), comm.reduce_scatter(host))
            whole, mine = cupy.asarray(base), base.copy()
            assert comm.broadcast(cut(whole), comm.size - 1) is not whole
            comm.broadcast(cut(mine), comm.size - 1)
            same(whole, mine)

    ranks(check)


def test_out_in_place_and_beside(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        for dtype in (np.float32, np.float16, np.int32):
            host = np.full((2, 3), comm.rank + 1, dtype)
            expected = np.full((2, 3), sum(range(comm.size + 1)), dtype)
            x, out = cupy.asarray(host), cupy.empty((2, 3), dtype)
            strided = cupy.empty((2, 6), dtype)[:, ::2]
            for into in (out, strided, x):
                assert comm.all_reduce(x, out=into) is into
                same(into, expected)
            x = cupy.asarray(host)
            assert comm.reduce(x, out=x) is (x if comm.rank == 0 else None)
            same(x, expected if comm.rank == 0 else host)
        base = cupy.asarray(np.arange(10.0))
        comm.all_reduce(base[:8], out=base[2:])
        same(base[2:], comm.size * np.arange(8.0))
        with pytest.raises(collectives.ArgumentError, match=r"out should be float64 \(3,\), is float64 \(4,\)"):
            comm.all_reduce(cupy.asarray(np.ones(3)), out=cupy.empty(4))
        # What is found out only after an exchange leaves the order of calls intact.
        with pytest.raises(collectives.ArgumentError, match="out should be"):
            comm.all_gather(cupy.asarray(np.ones((1, 2))), out=cupy.empty((comm.size, 3)))
        same(comm.all_reduce(cupy.asarray(np.ones(1))), np.full(1, float(comm.size)))

    ranks(check)


def test_movements_of_uneven_parts(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        lengths = [(5 * rank) % 7 for rank in range(comm.size)]
        host = values((lengths[comm.rank], 3), np.int16, comm.rank)
        x = cupy.asarray(host)
        for known in (None, lengths):
            same(comm.all_gather(x, lengths=known), comm.all_gather(host, lengths=known))
            for root in (0, comm.size - 1):
                same(comm.gather(x, root, lengths=known), comm.gather(host, root, lengths=known))
        table = [[(source + 2 * to) % 4 for to in range(comm.size)] for source in range(comm.size)]
        host = values((sum(table[comm.rank]), 2), np.float64, comm.rank)
        x = cupy.asarray(host)
        for known in (None, table[comm.rank], table):
            same(comm.all_to_all(x, lengths=known), comm.all_to_all(host, lengths=known))
        host = values((13, 2), np.uint8, comm.rank)
        root = comm.size - 1
        for known in (None, [13] + [0] * (comm.size - 1)):
            mine = comm.scatter(host if comm.rank == root else None, root, lengths=known)
            out = cupy.empty(mine.shape, mine.dtype)
            whole = cupy.asarray(host) if comm.rank == root else None
            assert comm.scatter(whole, root, lengths=known, out=out) is out
            same(out, mine)

    ranks(check)


def test_p2p_goes_through_the_host(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for count in (3, 3000):
            x = cupy.asarray(np.full((count, 2), comm.rank, np.float32)) * 2
            sent = comm.send(x, right, async_op=True)
            out, strided = cupy.empty((count, 2), np.float32), cupy.empty((count, 4), np.float32)[:, ::2]
            assert comm.recv(left, out=out) is out
            sent.wait()
            same(out, np.full((count, 2), 2 * left, np.float32))
            sent = comm.send(x, right, async_op=True)
            coming = comm.recv(left, out=strided, async_op=True)
            assert coming.wait() is strided
            sent.wait()
            same(strided, np.full((count, 2), 2 * left, np.float32))

    ranks(check)


def test_what_lies_elsewhere_is_named_on_every_rank(ranks: Ranks) -> None:
    def check(comm: Any, cupy: Any) -> None:
        x = np.ones(3)
        if comm.size > 1:
            with pytest.raises(collectives.MismatchError, match="sum on GPU"):
                comm.all_reduce(cupy.asarray(x) if comm.rank == 0 else x)
            with pytest.raises(collectives.MismatchError, match=r"float64 \(3,\)"):
                comm.all_reduce(cupy.asarray(np.ones(3 if comm.rank else 4)))
        same(comm.all_reduce(cupy.asarray(x)), x * comm.size)

    ranks(check)
