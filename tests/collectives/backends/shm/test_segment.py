"""Arrays of `comm.empty`: found again through views and offsets, by one number on all ranks, until all are gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator
from collectives.backends.shm.control_block import STAGING_BYTES
from collectives.backends.shm.segment import NOWHERE, ArrayLocation
from collectives.backends.shm.shm_transport import ShmTransport
from tests.collectives.backends.shm.ranks import run_sharing

SIZES = pytest.mark.parametrize("size", [2, 3, 5])
N = STAGING_BYTES  # items: more than one tile of any dtype


def shared(comm: Communicator) -> Any:
    assert isinstance(comm.transport, ShmTransport)
    return comm.transport.shared_arrays


@SIZES
def test_views_at_any_offset_are_reduced_where_they_lie(size: int) -> None:
    def check(comm: Communicator) -> None:
        whole = comm.empty((4, N), np.float32)
        assert (whole.shape, whole.dtype, whole.flags.c_contiguous) == ((4, N), np.float32, True)
        assert not whole.any()
        arrays = shared(comm)
        number = arrays.find(whole).segment
        assert arrays.find(whole) == ArrayLocation(number, 0) != NOWHERE
        assert arrays.find(whole[2]) == ArrayLocation(number, 8 * N)
        assert arrays.find(whole.reshape(-1)[7 : 7 + N]) == ArrayLocation(number, 28)
        total = sum(range(comm.size))
        for start in (0, 7, N + 1, 3 * N):
            flat = whole.reshape(-1)
            flat[:] = np.arange(4 * N) % 100
            x = flat[start : start + N]
            x += comm.rank
            want = np.arange(start, start + N) % 100 * comm.size + total
            assert_array_equal(comm.all_reduce(x), want)
            assert comm.all_reduce(x, out=x) is x
            assert_array_equal(x, want)
            assert_array_equal(flat[:start], np.arange(start) % 100)  # and what is beside it stays as it was
            assert_array_equal(flat[start + N :], np.arange(start + N, 4 * N) % 100)

    run_sharing(check, [0] * size)


@SIZES
def test_each_rank_may_bring_another_part_or_memory_of_its_own(size: int) -> None:
    def check(comm: Communicator) -> None:
        one, two = comm.empty(2 * N), comm.empty(2 * N)
        for private in range(-1, comm.size):
            for base, out in ((one, None), (one, "x"), ([one, two][comm.rank % 2], "beside")):
                x = np.empty(N, np.float32) if comm.rank == private else base[comm.rank : comm.rank + N]
                x[:] = np.arange(N) % 50 + comm.rank
                beside = (two if base is one else one)[5 : 5 + N]
                given = {None: None, "x": x, "beside": beside if comm.rank != 0 else np.empty(N, np.float32)}[out]
                want = np.arange(N) % 50 * comm.size + sum(range(comm.size))
                assert_array_equal(comm.all_reduce(x, out=given), want)
                if out != "x":
                    assert_array_equal(x, np.arange(N) % 50 + comm.rank)

    run_sharing(check, [0] * size)


@SIZES
def test_an_array_that_one_rank_dropped_is_still_the_others(size: int) -> None:
    def check(comm: Communicator) -> None:
        arrays = shared(comm)
        x, y = comm.empty(N), comm.empty(N)
        first, second = arrays.find(x).segment, arrays.find(y).segment
        if comm.rank == 0:
            x = np.empty(N, np.float32)
        z = comm.empty(N)  # a moment at which dropped arrays are looked for
        third = arrays.find(z).segment
        assert len({0, first, second, third}) == 4
        for each in (x, y, z):
            each[:] = comm.rank + 1
            assert_array_equal(comm.all_reduce(each, out=each), np.full(N, sum(range(comm.size + 1))))
        view = y[3:]
        del x, y
        comm.barrier()
        assert arrays.find(view) == ArrayLocation(second, 12)  # a view keeps it
        comm.empty(1)
        comm.barrier()
        comm.empty(1)
        assert first not in arrays._open
        assert {second, third} < set(arrays._open)
        assert len(arrays._open) == 3  # and the last one
        assert arrays.find(np.empty(N)) == NOWHERE
        view[:] = 1
        assert_array_equal(comm.all_reduce(view), np.full(N - 3, comm.size))

    run_sharing(check, [0] * size)


@SIZES
def test_moves_read_shared_arrays_where_they_lie(size: int) -> None:
    def check(comm: Communicator) -> None:
        x = comm.empty((size * N, 2), np.int16)
        x[:] = np.arange(2 * size * N).reshape(-1, 2) % 1000 + comm.rank
        plain = x - comm.rank
        for root in range(size):
            on_root = comm.gather(x, root)
            assert (on_root is None) == (comm.rank != root)
            if on_root is not None:
                assert_array_equal(on_root, np.concatenate([plain + rank for rank in range(size)]))
            part = comm.scatter(x if comm.rank == root else None, root)
            assert_array_equal(part, np.array_split(plain + root, size)[comm.rank])
            y = comm.empty(x.shape, x.dtype)
            y[:] = x
            comm.broadcast(y, root)
            assert_array_equal(y, plain + root)
        assert_array_equal(comm.all_gather(x), np.concatenate([plain + rank for rank in range(size)]))
        mine = [np.array_split(plain + rank, size)[comm.rank] for rank in range(size)]
        assert_array_equal(comm.all_to_all(x), np.concatenate(mine))
        assert_array_equal(comm.reduce_scatter(x), sum(mine))
        x[:] = 0  # nobody still reads what this rank brought

    run_sharing(check, [0] * size)


def test_shapes_and_dtypes_of_all_kinds() -> None:
    import ml_dtypes

    def check(comm: Communicator) -> None:
        for shape in ((), 0, 5, (0, 3), (2, 0), (3, 4, 5), np.int64(7)):
            for dtype in (np.float32, "f8", bool, np.int8, np.complex128, ml_dtypes.bfloat16):
                x = comm.empty(shape, dtype)
                assert x.shape == np.empty(shape).shape
                assert x.dtype == np.dtype(dtype)
                assert x.flags.writeable
        for wrong in (-1, (2, -1), (1.5,), "ab"):
            with pytest.raises(collectives.ArgumentError, match="shape should be"):
                comm.empty(wrong)  # type: ignore[arg-type]  # what is refused
        with pytest.raises(collectives.DtypeError):
            comm.empty(3, object)
        with pytest.raises(collectives.MismatchError):
            comm.empty(3 + comm.rank)
        assert comm.all_reduce(comm.empty(3)).tolist() == [0, 0, 0]

    run_sharing(check, [0, 0, 0])
    collectives.run_threads(check, 2)
