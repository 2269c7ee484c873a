"""Arrays of other libraries on the stand-in: whose stream waits for whose, and that the host waits for none."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
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


class _On:
    """A tensor of a library whose current stream is another one than ours."""

    def __init__(self, x: Any, stream: Any) -> None:
        self.x = x
        self.current = stream
        self.dtype = x.dtype

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        with self.current:
            return self.x.__dlpack__(**options)


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
        assert ddp.from_dlpack(x, device="cuda", copy=False).data_ptr() == x.data_ptr()
        assert ddp.from_dlpack(x, device="cpu").tolist() == y.tolist()
        assert y.sum().tolist() == 21.0


def test_who_has_no_interface(gpu: Any) -> None:
    x = ddp.ones(3, device="cuda")
    assert hasattr(x, "__cuda_array_interface__")
    assert not hasattr(x.bfloat16(), "__cuda_array_interface__"), "it has no name for bfloat16"
    assert not hasattr(ddp.ones(3), "__cuda_array_interface__")
    assert not hasattr(ddp.ones(3, device="cuda", requires_grad=True), "__cuda_array_interface__")
    assert hasattr(x, "__dlpack__")
