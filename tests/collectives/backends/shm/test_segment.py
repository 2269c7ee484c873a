"""Shared memory and arrays in it: found again, refused where it cannot be had, given back when all have let go."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import platform
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import Communicator, run_threads
from collectives.backends.shm import segment
from collectives.backends.shm.segment import NOWHERE, TILE_BYTES, ArrayLocation
from collectives.backends.shm.shm_transport import ShmTransport
from collectives.reduction import BFLOAT16
from tests.collectives.backends.shm.ranks import run_sharing

SIZES = pytest.mark.parametrize("size", [2, 4])  # up to three ranks have large buffers
N = TILE_BYTES  # items: more than one tile of any dtype


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
        assert arrays.find(whole.reshape(-1)[7 : 7 + N]) == ArrayLocation(number, 28) != NOWHERE
        flat = whole.reshape(-1)
        for start in (0, 7, N + 1, 3 * N):
            flat[:] = beside = np.arange(4 * N) % 100
            x = flat[start : start + N]
            want = beside[start : start + N] * comm.size + sum(range(comm.size))
            x += comm.rank
            assert_array_equal(comm.all_reduce(x), want)
            assert comm.all_reduce(x, out=x) is x
            # And what is beside it stays as it was.
            assert_array_equal(flat, np.concatenate([beside[:start], want, beside[start + N :]]))

    run_sharing(check, [0] * size)


@SIZES
@pytest.mark.parametrize("length", [50_000, 100_000, 400_000], ids=["copied", "in place or copied", "in place"])
def test_ranks_whose_arrays_lie_in_shared_memory_and_others(size: int, length: int) -> None:
    def check(comm: Communicator) -> None:
        want = np.arange(length) * comm.size + sum(range(comm.size))
        for who in (lambda rank: True, lambda rank: rank == 0, lambda rank: rank != 0):
            x = comm.empty(length)
            x = x if who(comm.rank) else np.empty(length, np.float32)
            for step in range(4):
                for out in (None, x):
                    x[:] = np.arange(length) + comm.rank
                    async_op = (step + comm.rank) % 3 == 0
                    y = comm.all_reduce(x, out=out, async_op=async_op)
                    assert_array_equal(y.wait() if async_op else y, want)
                x[:] = comm.rank
                assert_array_equal(comm.broadcast(x, comm.size - 1), np.full(length, comm.size - 1))

    run_sharing(check, [0] * size)


def test_a_cached_call_beside_one_on_the_general_path_has_no_shared_array_of_an_earlier_call() -> None:
    def check(comm: Communicator) -> None:
        a = comm.empty(131_072)
        c = np.ones(131_072, np.float32)

        def total(x: Any) -> Any:
            return comm.all_reduce(x, out=x)

        total(c)  # prepares
        for _ in range(2):
            comm.all_reduce(a, out=a, async_op=True).wait()
        c[:] = 1
        a[:] = 10 if comm.rank else -5
        mine, beside, left = (a, c, 1) if comm.rank else (c, a, -5)
        total(c) if comm.rank == 0 else comm.all_reduce(a, out=a, async_op=True).wait()
        assert (mine == 11).all()
        assert (beside == left).all()

    run_sharing(check, [0, 0])


@SIZES
def test_an_array_that_one_rank_dropped_is_still_the_others(size: int) -> None:
    def check(comm: Communicator) -> None:
        arrays = shared(comm)
        x, y = comm.empty(N), comm.empty(N)
        first, second = arrays.find(x).segment, arrays.find(y).segment
        if comm.rank == 0:
            x = np.empty(N, np.float32)
        z = comm.empty(N)  # a moment at which dropped arrays are looked for
        for each in (x, y, z):
            each[:] = comm.rank + 1
            assert (comm.all_reduce(each, out=each) == sum(range(comm.size + 1))).all()
        view = y[3:]
        del x, y
        for _ in range(2):
            comm.barrier()
            comm.empty(1)
        assert arrays.find(view) == ArrayLocation(second, 12)  # a view keeps it
        assert first not in arrays._open
        assert {second, arrays.find(z).segment} < set(arrays._open)
        assert len(arrays._open) == 3  # and the last one
        view[:] = 1
        assert (comm.all_reduce(view) == comm.size).all()

    run_sharing(check, [0] * size)


def test_shapes_and_dtypes_of_all_kinds() -> None:
    def check(comm: Communicator) -> None:
        for shape in ((), 0, 5, (0, 3), (2, 0), (3, 4, 5), np.int64(7)):
            for dtype in (np.float32, "f8", bool, np.int8, np.complex128, BFLOAT16):
                x = comm.empty(shape, dtype)
                assert (x.shape, x.dtype, x.flags.writeable) == (np.empty(shape).shape, np.dtype(dtype), True)
        assert comm.all_reduce(comm.empty(3)).tolist() == [0, 0, 0]

    run_sharing(check, [0, 0])
    run_threads(check, 2)


on_one_node_and_on_two = pytest.mark.parametrize("nodes", [[0, 0], [0, 1, 0, 1]], ids=str)


def use(comm: Communicator) -> None:
    total = sum(range(comm.size))
    for length in (3, 100_000):
        x = comm.empty(length)
        assert not x.any()
        x[:] = comm.rank
        assert_array_equal(comm.all_reduce(x), np.full(length, total))
        assert_array_equal(comm.all_reduce(x, out=x), np.full(length, total))


def no_memfd(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*args: Any) -> int:
        raise PermissionError(1, "seccomp says no")

    monkeypatch.setattr(os, "memfd_create", refuse)
    return "rank 0 cannot make a segment of .* seccomp says no"


def not_to_be_reached(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*args: Any) -> segment.Segment:
        raise FileNotFoundError(2, "no such process")

    monkeypatch.setattr(segment, "attach", refuse)
    return r"rank \d \(pid \d+\) cannot map the segment of rank 0: .*no such process"


def another_container(monkeypatch: pytest.MonkeyPatch) -> str:
    create = segment.create

    def elsewhere(nbytes: int) -> segment.Segment:
        made = create(nbytes)
        made.address = made.address._replace(token=made.address.token ^ 1)
        return made

    monkeypatch.setattr(segment, "create", elsewhere)
    return "is not the rank that was meant: another container"


def too_small(monkeypatch: pytest.MonkeyPatch) -> str:
    create = segment.create
    monkeypatch.setattr(segment, "create", lambda nbytes: create(nbytes // 2))
    return "mmap length is greater than file size"


def another_processor(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    return "the order of stores is not kept on aarch64"


@pytest.mark.parametrize("refuse", [no_memfd, not_to_be_reached, another_container, too_small, another_processor])
def test_without_shared_memory_everything_still_works_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch], str],
) -> None:
    reason = refuse(monkeypatch)

    def check(comm: Communicator) -> None:
        assert not comm.transport.shares_memory
        use(comm)
        use(comm.duplicate())  # which says nothing again

    with caplog.at_level(logging.WARNING, "collectives"):
        run_sharing(check, [0, 1, 0, 1])
    (message,) = caplog.messages
    assert re.search(reason, message)
    assert "go through threads and not through shared memory" in message


@on_one_node_and_on_two
def test_an_array_that_cannot_be_shared_is_the_ranks_own_and_numbers_stay_equal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nodes: list[int]
) -> None:
    create = segment.create
    limit = 9 << 20

    def rationed(nbytes: int) -> segment.Segment:
        if nbytes > limit:
            raise OSError(28, "no space left")
        return create(nbytes)

    monkeypatch.setattr(segment, "create", rationed)

    def check(comm: Communicator) -> None:
        first, large, second = comm.empty(50_000), comm.empty(3 << 20), comm.empty(50_000)
        arrays = comm.transport.shared_arrays
        assert arrays is not None
        numbers = [arrays.find(x).segment for x in (first, large, second)]
        assert numbers[1] == 0
        assert len(set(numbers)) == 3
        everyones = comm.all_gather_object(numbers)
        assert all(everyones[rank] == numbers for rank, node in enumerate(nodes) if node == comm.node)
        for x in (second, large, first):
            x[:] = comm.rank
            assert (comm.all_reduce(x, out=x) == sum(range(comm.size))).all()

    with caplog.at_level(logging.WARNING, "collectives"):
        run_sharing(check, nodes)
    assert len(caplog.messages) == len(set(nodes))  # one a node
    assert "comm.empty gives each rank memory of its own" in caplog.messages[0]


def short_machine(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(segment, "available_memory", lambda: 1 << 20)
    return "4194304 bytes are asked for, and 1048576 are free"


def silent_kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    texts = itertools.chain(["MemAvailable: 1024 kB\n"] * 2, itertools.repeat("MemTotal: 1024 kB\n"))
    monkeypatch.setattr(segment, "Path", lambda _: SimpleNamespace(read_text=lambda: next(texts)))
    return "/proc/meminfo should have a line MemAvailable"


def short_kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(fd: int, start: int, nbytes: int) -> None:
        if nbytes > 1 << 20:
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return "no space left"


@pytest.mark.parametrize("refuse", [short_machine, silent_kernel, short_kernel])
def test_an_array_for_which_there_is_no_memory_is_refused_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuse: Callable[[pytest.MonkeyPatch], str]
) -> None:
    said = refuse(monkeypatch)

    def check(comm: Communicator) -> None:
        small, large = comm.empty(1 << 16), comm.empty(1 << 20)
        arrays = comm.transport.shared_arrays
        assert arrays.find(small) != NOWHERE
        assert arrays.find(large) == NOWHERE
        large[:] = comm.rank
        assert (comm.all_reduce(large, out=large) == 1).all()

    with caplog.at_level(logging.WARNING, "collectives"):
        run_sharing(check, [0, 0])
    assert said in caplog.text


def held() -> tuple[int, int]:
    """Mappings of segments in this process, and its open files."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("ddp-shared" in line for line in maps), len(os.listdir("/proc/self/fd"))


@on_one_node_and_on_two
def test_what_was_shared_is_given_back(nodes: list[int]) -> None:
    def check(comm: Communicator) -> None:
        for _ in range(20):
            twin = comm.duplicate()
            twin.barrier()
            twin.close()
            x = comm.empty(20_000)
            comm.all_reduce(x, out=x)
            del x
        part = comm.split(comm.rank // 2)
        assert part is not None
        part.close()
        comm.empty(1)  # which looks at what has been dropped
        del twin, part
        comm.barrier()
        if comm.rank == 0:  # one alone can collect garbage
            in_use.append(held())
        comm.barrier()

    in_use: list[tuple[int, int]] = []
    run_sharing(Communicator.barrier, nodes)  # what is opened once and for all is open
    before = held()
    run_sharing(check, nodes)
    # Of each rank, all in this process: the board, and at most two arrays.
    assert in_use[0][0] <= before[0] + 3 * len(nodes)
    assert in_use[0][1] <= before[1] + 12
    assert np.all(np.array(held()) <= before)
