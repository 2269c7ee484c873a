"""What collectives on device arrays promise: the answer of the same host call, on fake GPUs and on real ones.

Each check takes a communicator and its rank's CuPy. Over host memory, and alone, the answer has the same bits; NCCL may
round a mean and a scaled sum once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from collectives import ArgumentError, DtypeError, MismatchError, ReduceOp
from collectives.reduction import wire_dtype

DTYPES = (
    np.float32,
    np.float64,
    np.float16,
    ml_dtypes.bfloat16,
    np.complex64,
    np.complex128,
    np.bool_,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
)
FEW = (np.float32, np.int16)  # what is tried with every reduction
FLOATING = (np.float32, np.float16, ml_dtypes.bfloat16, np.complex64)


def same(on_device: Any, on_host: Any, close: bool = False) -> None:
    assert (on_device is None) == (on_host is None)
    if on_host is not None:
        got = on_device.get()
        assert (got.dtype, got.shape) == (on_host.dtype, on_host.shape)
        if close and got.dtype.kind not in "biu":
            rounding = 4 * float(ml_dtypes.finfo(got.real.dtype).eps)
            assert_allclose(got.astype(complex), on_host.astype(complex), rtol=rounding)
        else:
            assert_array_equal(got, on_host)


def values(shape: tuple[int, ...], dtype: Any, rank: int) -> Any:
    count = int(np.prod(shape))
    return (np.arange(1, count + 1) % 7 + 2 * rank).reshape(shape).astype(dtype)


def is_over_nccl(comm: Any, cupy: Any) -> bool:
    comm.all_reduce(cupy.ones(1, np.float32))
    return bool(comm._device_communicator._device_transport.name == "NCCL")


def agree(comm: Any, cupy: Any, name: str, host: Any, *args: Any, close: bool = False, **options: Any) -> None:
    """The call gives on the device what it gives on the host, and leaves its input as it is."""
    x = cupy.asarray(host)
    call = getattr(comm, name)
    same(call(x, *args, **options), call(host, *args, **options), close)
    assert_array_equal(x.get(), host)


def reductions(comm: Any, cupy: Any) -> None:
    over_nccl = is_over_nccl(comm, cupy)
    for dtype, op in itertools.product(DTYPES, ReduceOp):
        host = values((7, 5), dtype, comm.rank)
        close = over_nccl and op is ReduceOp.MEAN
        try:
            wire_dtype(np.dtype(dtype), op)
        except DtypeError:
            with pytest.raises(DtypeError):
                comm.all_reduce(cupy.asarray(host), op)
            continue
        agree(comm, cupy, "all_reduce", host, op, close=close)
        if dtype not in FEW:
            continue
        agree(comm, cupy, "reduce", host, op, comm.size - 1, close=close)
        for lengths in (None, [0] * (comm.size - 1) + [7]):
            agree(comm, cupy, "reduce_scatter", host, op, lengths=lengths, close=close)


def order_of_the_tree(comm: Any, cupy: Any) -> None:
    for dtype, op in itertools.product((np.float32, np.float16, np.float64), ("sum", "mean")):
        host = np.random.default_rng(comm.rank).normal(size=(11, 3)).astype(dtype)
        agree(comm, cupy, "reduce_scatter", host, op, order="tree")
        for scale in (None, 0.3):
            agree(comm, cupy, "all_reduce", host, op, scale=scale, order="tree")
        x = cupy.asarray(host)
        same(comm.all_reduce(x, op, order="tree", out=x), comm.all_reduce(host, op, order="tree"))


def scales(comm: Any, cupy: Any) -> None:
    close = is_over_nccl(comm, cupy)
    late = cupy.asarray(np.array(0.25))  # a 0-d array on the device is never looked at by the host
    for dtype, op in itertools.product(FLOATING, ("sum", "mean")):
        host = values((6,), dtype, comm.rank)
        for scale in (0.5, np.float32(0.5), lambda: 0.5):
            agree(comm, cupy, "all_reduce", host, op, scale=scale, close=close)
        on_device = comm.all_reduce(cupy.asarray(host), op, scale=lambda: late)
        same(on_device, comm.all_reduce(host, op, scale=0.25), close)
    with pytest.raises(DtypeError, match="scale needs a floating"):
        comm.all_reduce(cupy.asarray(np.arange(3)), scale=0.5)


def nan_wins_max_and_min_on_every_rank(comm: Any, cupy: Any) -> None:
    for dtype, lost in itertools.product((np.float16, np.float32, np.float64), range(comm.size)):
        host = np.array([np.nan if comm.rank == lost else 1, comm.rank], dtype)
        for op in ("max", "min"):
            agree(comm, cupy, "all_reduce", host, op)
            agree(comm, cupy, "reduce", host, op)
            agree(comm, cupy, "reduce_scatter", np.tile(host, (comm.size, 1)), op)
        x = cupy.asarray(host)
        same(comm.all_reduce(x, "max", out=x), np.array([np.nan, comm.size - 1], dtype))


def layouts(comm: Any, cupy: Any) -> None:
    base = np.arange(24.0).reshape(4, 6) + comm.rank
    cuts: list[Callable[[Any], Any]] = [lambda a: a[::2, ::-3], lambda a: a.T, lambda a: a[:0], lambda a: a[0, 0]]
    for cut in cuts:
        whole = cupy.asarray(base)
        mine = base.copy()
        x, host = cut(whole), cut(base)
        calls = ["all_reduce", "all_gather", "reduce", *(["all_to_all", "reduce_scatter", "scatter"] if x.ndim else [])]
        for name in calls:
            same(getattr(comm, name)(x), getattr(comm, name)(host))
        assert comm.all_reduce(x).flags.c_contiguous
        same(comm.gather(x, lengths="equal"), comm.gather(host, lengths="equal"))
        comm.broadcast(cut(whole), comm.size - 1)
        if mine.size and host.ndim:
            comm.broadcast(cut(mine), comm.size - 1)
            same(whole, mine)
        else:
            comm.broadcast(np.array(host), comm.size - 1)
    with pytest.raises(ArgumentError, match="0-d"):
        comm.all_to_all(cupy.ones(()))


def out_in_place_and_beside(comm: Any, cupy: Any) -> None:
    for dtype in (np.float32, np.float16, np.int32):
        host = np.full((2, 3), comm.rank + 1, dtype)
        expected = np.full((2, 3), sum(range(comm.size + 1)), dtype)
        x = cupy.asarray(host)
        for into in (cupy.empty((2, 3), dtype), cupy.empty((2, 6), dtype)[:, ::2], x):
            assert comm.all_reduce(x, out=into) is into
            same(into, expected)
        x = cupy.asarray(host)
        assert comm.reduce(x, out=x) is (x if comm.rank == 0 else None)
        same(x, expected if comm.rank == 0 else host)
    base = cupy.asarray(np.arange(10.0))
    comm.all_reduce(base[:8], out=base[2:])
    same(base[2:], comm.size * np.arange(8.0))
    with pytest.raises(ArgumentError, match=r"out should be float64 \(8,\), is float64 \(4,\)"):
        comm.all_reduce(base[2:], out=cupy.empty(4))
    # What is found out only after an exchange leaves the order of calls intact.
    with pytest.raises(ArgumentError, match="out should be"):
        comm.all_gather(base, out=cupy.empty(1))
    agree(comm, cupy, "all_reduce", np.ones(1))


def movements_of_uneven_parts(comm: Any, cupy: Any) -> None:
    lengths = [(5 * rank) % 7 for rank in range(comm.size)]
    host = values((lengths[comm.rank], 3), np.int16, comm.rank)
    for known in (None, lengths):
        agree(comm, cupy, "all_gather", host, lengths=known)
        for root in (0, comm.size - 1):
            agree(comm, cupy, "gather", host, root, lengths=known)
    table = [[(source + 2 * to) % 4 for to in range(comm.size)] for source in range(comm.size)]
    host = values((sum(table[comm.rank]), 2), np.float64, comm.rank)
    for known in (None, table[comm.rank], table):
        agree(comm, cupy, "all_to_all", host, lengths=known)
    host = values((13, 2), np.uint8, comm.rank)
    root = comm.size - 1
    for known in (None, [13] + [0] * (comm.size - 1)):
        mine = comm.scatter(host if comm.rank == root else None, root, lengths=known)
        out = cupy.empty(mine.shape, mine.dtype)
        whole = cupy.asarray(host) if comm.rank == root else None
        assert comm.scatter(whole, root, lengths=known, out=out) is out
        same(out, mine)


def messages_go_through_the_host(comm: Any, cupy: Any) -> None:
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    for count in (3, 3000):
        x = cupy.asarray(np.full((count, 2), comm.rank, np.float32)) * 2
        for out in (cupy.empty((count, 2), np.float32), cupy.empty((count, 4), np.float32)[:, ::2]):
            sent = comm.send(x, right, async_op=True)
            coming = comm.recv(left, out=out, async_op=True)
            assert coming.wait() is out
            sent.wait()
            same(out, np.full((count, 2), 2 * left, np.float32))


def what_lies_elsewhere_is_named_on_every_rank(comm: Any, cupy: Any) -> None:
    x = np.ones(3)
    mismatched = (
        (x if comm.rank else cupy.asarray(x), None, "sum on GPU"),
        (cupy.asarray(np.ones(3 if comm.rank else 4)), None, r"float64 \(3,\)"),
        (cupy.asarray(x), comm.rank + 1.0, r"sum on GPU scale 2\.0"),
    )
    for array, scale, words in mismatched if comm.size > 1 else ():
        with pytest.raises(MismatchError, match=words):
            comm.all_reduce(array, scale=scale)
    agree(comm, cupy, "all_reduce", x)


def duplicates_and_parts(comm: Any, cupy: Any) -> None:
    works = [comm.all_reduce(cupy.asarray(np.full(1000, float(i))), async_op=True) for i in range(20)]
    for i, work in enumerate(works):
        same(work.wait(), np.full(1000, float(i * comm.size)))
    twin = comm.duplicate()
    part = comm.split(comm.rank % 2, -comm.rank)
    same(twin.all_reduce(cupy.asarray(np.ones(3))), np.full(3, float(comm.size)))
    same(part.all_gather(cupy.asarray(np.array([comm.rank]))), part.all_gather(np.array([comm.rank])))
    same(part.all_reduce(cupy.asarray(np.ones(3))), np.full(3, float(part.size)))
    twin.close()
    part.close()


CHECKS: tuple[Callable[[Any, Any], None], ...] = (
    reductions,
    order_of_the_tree,
    scales,
    nan_wins_max_and_min_on_every_rank,
    layouts,
    out_in_place_and_beside,
    movements_of_uneven_parts,
    messages_go_through_the_host,
    what_lies_elsewhere_is_named_on_every_rank,
    duplicates_and_parts,
)


def contract(comm: Any, cupy: Any) -> None:
    """All of it."""
    for check in CHECKS:
        check(comm, cupy)
