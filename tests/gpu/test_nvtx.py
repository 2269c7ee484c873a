"""Ranges and marks as CuPy takes them."""

from __future__ import annotations

from typing import Any

from ddp.cuda import nvtx


def test_what_a_profiler_is_told(gpu: Any) -> None:
    with nvtx.range("step {}", 3):
        assert nvtx.range_push("inside") == 1
        nvtx.mark("here")
        assert nvtx.range_pop() == 1
    nvtx.range_end(nvtx.range_start("long"))
    assert gpu.cupy.cuda.nvtx.shown == [
        ("push", b"step 3"),
        ("push", b"inside"),
        ("mark", b"here"),
        ("pop",),
        ("pop",),
        ("start", b"long", None),
        ("end", 1),
    ]


def test_a_cupy_without_it(gpu: Any) -> None:
    gpu.cupy.cuda.nvtx.available = False
    nvtx.mark("here")
    assert nvtx.range_start("long") == 0
    assert not gpu.cupy.cuda.nvtx.shown
