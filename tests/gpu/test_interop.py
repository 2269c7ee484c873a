"""Arrays of other libraries on the stand-in: whose stream waits for whose, and that the host waits for none."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, GraphError
from tests.gpu import simulated

BOTH = pytest.mark.parametrize("gpu", ["eager", *simulated(8)], indirect=True)


class Theirs:
    """Another library's array on a GPU: an address, and the stream that its last kernel went to."""

    def __init__(self, array: Any, stream: int | None, **more: Any) -> None:
        self.array = array
        self.told = {**array.__cuda_array_interface__, "stream": stream, **more}
        if stream is None:
            del self.told["stream"]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.told


@pytest.mark.parametrize("make", [ddp.as_tensor, ddp.asarray, ddp.tensor], ids=lambda make: make.__name__)
@BOTH
def test_our_stream_waits_for_theirs(gpu: Any, make: Any) -> None:
    xp = gpu.cupy
    mine, other = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    with other:
        array = xp.arange(1000, dtype="f4")
        array += 1
        theirs = Theirs(array, other.ptr)
    gpu.reset()
    with mine:
        x = make(theirs)
        y = x * 2
        assert not gpu.synchronizations, "the host goes on"
        assert y.tolist() == [2.0 * (i + 1) for i in range(1000)]
    if make is not ddp.tensor:
        assert x.data_ptr() == array.data.ptr


@BOTH
def test_their_stream_waits_for_ours(gpu: Any) -> None:
    xp = gpu.cupy
    mine, other = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    with mine:
        x = ddp.arange(1000, dtype=ddp.float32, device="cuda") + 1
        with other:  # their library's current stream, which it names in the call
            gpu.reset()
        capsule = x.__dlpack__(stream=other.ptr)
        assert not gpu.synchronizations
    with other:
        assert (capsule.array * 2).get().tolist() == [2.0 * (i + 1) for i in range(1000)]


@BOTH
def test_from_dlpack_and_back(gpu: Any) -> None:
    xp = gpu.cupy
    mine, other = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    with mine:
        x = ddp.arange(6.0, device="cuda").reshape(2, 3) + 1
    with other:
        y = ddp.from_dlpack(_On(x, mine))
        assert y.data_ptr() == x.data_ptr()
        assert y.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
        assert ddp.from_dlpack(x, device="cpu").tolist() == y.tolist()


class _On:
    """A tensor of a library whose current stream is another one than ours."""

    def __init__(self, x: Any, stream: Any) -> None:
        self.x, self.current, self.dtype = x, stream, x.dtype

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        with self.current:
            return self.x.__dlpack__(**options)


@pytest.mark.parametrize(
    ("stream", "edges"),
    [
        (-1, []),
        (None, ["wait"]),
        (1, ["wait"]),
        (0, ["wait"]),
        (2, ["wait"]),
    ],
)
def test_streams_by_number(gpu: Any, stream: int | None, edges: list[str]) -> None:
    """The null stream is 1, or None; a thread's own is 2; -1 asks for no order."""
    mine = gpu.cupy.cuda.Stream(non_blocking=True)
    with mine:
        x = ddp.ones(3, device="cuda")
        gpu.reset()
        x.__dlpack__(stream=stream)
    assert [what for name, what in gpu.log if what == "wait"] == edges
    assert all(name.startswith("default") for name, what in gpu.log if what == "wait")


def test_one_stream_needs_no_event(gpu: Any) -> None:
    x = ddp.ones(3, device="cuda")
    gpu.reset()
    x.__dlpack__()
    x.__dlpack__(stream=1)
    ddp.as_tensor(Theirs(x.array, 1))
    with (mine := gpu.cupy.cuda.Stream()):
        y = x + 1
        gpu.reset()
        y.__dlpack__(stream=mine.ptr)
    assert [what for _, what in gpu.log if what in ("wait", "record")] == []


def test_no_stream_at_all(gpu: Any) -> None:
    x = ddp.ones(3, device="cuda")
    for wrong in (-2, 1.5, "default"):
        with pytest.raises(ArgumentError, match="expected -1"):
            x.__dlpack__(stream=wrong)


def test_what_a_consumer_may_ask_for(gpu: Any) -> None:
    x = ddp.tensor([1.0, 2.0], device="cuda")
    with pytest.raises(BufferError, match=r"cuda:0 has no memory on \(2, 1\)"):
        x.__dlpack__(dl_device=(2, 1))
    with pytest.raises(BufferError, match=r"cuda:0 has no memory on \(1, 0\)"):
        x.__dlpack__(dl_device=(1, 0), copy=False)
    assert x.__dlpack__(copy=True).array.data.ptr != x.data_ptr()
    assert x.__dlpack__(dl_device=(2, 0)).array.data.ptr == x.data_ptr()

    class ForTheCpu:
        def __dlpack_device__(self) -> Any:
            return 1, 0

        def __dlpack__(self, **options: Any) -> Any:
            return x.__dlpack__(dl_device=(1, 0), stream=None)

    assert np.from_dlpack(ForTheCpu()).tolist() == [1.0, 2.0]
    with pytest.raises(GraphError, match="detach"):
        x.requires_grad_().__dlpack__()
    with pytest.raises(ArgumentError, match="cuda:0 cannot become a tensor on cpu without a copy"):
        ddp.from_dlpack(x.detach(), device="cpu", copy=False)


def test_it_names_the_stream_of_its_own_device(gpu: Any) -> None:
    xp = gpu.cupy
    with xp.cuda.Device(1):
        mine = xp.cuda.Stream(non_blocking=True)
        mine.use()
        x = ddp.ones(2, 3, device="cuda:1")
    try:
        told = x[:, ::2].__cuda_array_interface__
        assert told["stream"] == mine.ptr
        assert told["version"] == 3
        assert told["shape"] == (2, 2)
        assert told["strides"] == (12, 8)
        assert told["data"] == (x.data_ptr(), False)
    finally:
        with xp.cuda.Device(1):
            xp.cuda.Stream.null.use()


def test_who_has_no_interface(gpu: Any) -> None:
    x = ddp.ones(3, device="cuda")
    assert hasattr(x, "__cuda_array_interface__")
    assert not hasattr(x.bfloat16(), "__cuda_array_interface__"), "it has no name for bfloat16"
    assert not hasattr(ddp.ones(3), "__cuda_array_interface__")
    assert not hasattr(ddp.ones(3, device="cuda", requires_grad=True), "__cuda_array_interface__")
    assert hasattr(x, "__dlpack__")


def test_views_empty_ones_and_read_only_ones(gpu: Any) -> None:
    array = gpu.cupy.arange(12, dtype="f4").reshape(3, 4)
    x = ddp.as_tensor(Theirs(array.T, 1))
    assert x.stride() == (1, 4)
    x[0, 1] = 99
    assert array[1, 0].item() == 99.0
    assert ddp.as_tensor(Theirs(array[:0], 1)).shape == (0, 4)
    with pytest.warns(UserWarning, match="the memory of this Theirs is read-only"):
        ddp.as_tensor(Theirs(array, 1, data=(array.data.ptr, True)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp.as_tensor(Theirs(array, None))
    with pytest.raises(DtypeError, match="fill in what is masked"):
        ddp.as_tensor(Theirs(array, 1, mask=object()))


def test_their_memory_lives_as_long_as_ours_looks_at_it(gpu: Any) -> None:
    theirs = Theirs(gpu.cupy.arange(5, dtype="f4"), 1)
    x = ddp.as_tensor(theirs)
    del theirs
    y = ddp.zeros(5, device="cuda") + 7  # would take what was freed
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert y.tolist() == [7.0] * 5


@BOTH
def test_bfloat16(gpu: Any) -> None:
    xp = gpu.cupy
    mine, other = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    with mine:
        x = ddp.arange(6.0, device="cuda").bfloat16() + 1
    with other:
        y = ddp.from_dlpack(_On(x, mine))
        assert y.dtype == ddp.bfloat16
        assert y.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
