"""Memory that NCCL moves without copies: who gets it, when it is given back, and what happens where there is none."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives.backends.nccl import nccl_communicator
from tests.collectives.backends.device.conftest import Rig
from tests.collectives.backends.device.fake_nccl import FakeLibrary


def test_an_array_like_one_on_a_gpu_is_registered_and_reduced_where_it_lies(rig: Callable[..., Rig]) -> None:
    library = FakeLibrary()
    made = rig(2, library)

    def rank(comm: Any, cupy: Any) -> Any:
        x = comm.empty((3, 5), np.float32, like=cupy.empty(0))
        assert (x.shape, x.dtype, x.device.id) == ((3, 5), np.float32, comm.rank)
        assert x.data.ptr in library.memory
        assert not x.get().any()
        x[...] = comm.rank + 1
        comm.all_reduce(x, out=x)
        return x.get()

    for got in made.run(rank):
        assert_array_equal(got, np.full((3, 5), 3, np.float32))
    assert sorted(call for call in made.hub.calls if call[1] == "register") == [(0, "register"), (1, "register")]


def test_memory_is_given_back_once_no_rank_holds_it(rig: Callable[..., Rig]) -> None:
    library = FakeLibrary()
    made = rig(2, library)

    def rank(comm: Any, cupy: Any) -> None:
        like = cupy.empty(0)
        x = comm.empty(4, np.float32, like=like)
        pointer = x.data.ptr
        part = x[1:3]
        del x
        comm.barrier()
        comm.empty(4, np.float32, like=like)
        assert pointer not in library.freed, "a view still held it"
        if comm.rank == 0:
            del part  # rank 1 keeps its own
        gc.collect()
        comm.barrier()
        comm.empty(4, np.float32, like=like)
        assert pointer not in library.freed, "the other rank still held its own"
        if comm.rank == 1:
            del part
        gc.collect()
        comm.barrier()
        comm.empty(4, np.float32, like=like)
        comm.barrier()
        assert pointer in library.freed

    made.run(rank)
    assert [each for each in made.hub.calls if each[1] == "deregister"]


def test_a_rank_without_the_memory_has_all_take_cupys(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeLibrary()
    made = rig(2, library)
    taken: list[int] = []
    allocate = nccl_communicator.allocate

    def scarce(nccl: Any, nbytes: int) -> int:
        taken.append(nbytes)
        if len(taken) == 2:
            raise collectives.NcclError("ncclMemAlloc of 4096 bytes returned 1 (out of memory)")
        return allocate(nccl, nbytes)

    monkeypatch.setattr(nccl_communicator, "allocate", scarce)

    def rank(comm: Any, cupy: Any) -> Any:
        x = comm.empty(4, np.float32, like=cupy.empty(0))
        assert x.data.ptr not in library.memory
        x[...] = 1
        return comm.all_reduce(x).get()

    with caplog.at_level(logging.INFO, "collectives"):
        for got in made.run(rank):
            assert_array_equal(got, np.full(4, 2, np.float32))
    assert "memory for NCCL comes from CuPy" in caplog.text
    assert len(library.freed) == 1
    assert not [each for each in made.hub.calls if each[1] == "register"]


@pytest.mark.parametrize("nccl", [None, FakeLibrary(lacks=("ncclMemAlloc",))])
def test_where_there_is_no_such_memory_the_array_is_cupys(rig: Callable[..., Rig], nccl: Any) -> None:
    def rank(comm: Any, cupy: Any) -> Any:
        x = comm.empty((2, 2), np.float64, like=cupy.empty(0))
        assert not x.get().any()
        x[...] = 2
        return comm.all_reduce(x).get()

    for got in rig(2, nccl).run(rank):
        assert_array_equal(got, np.full((2, 2), 4.0))


def test_none_while_a_graph_is_captured(rig: Callable[..., Rig]) -> None:
    def rank(comm: Any, cupy: Any) -> None:
        like = cupy.empty(0)
        comm.all_reduce(cupy.asarray(np.ones(2)))
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        try:
            with pytest.raises(collectives.ArgumentError, match="while a graph is captured"):
                comm.empty(4, np.float32, like=like)
        finally:
            stream.end_capture()

    rig(1, FakeLibrary()).run(rank)
