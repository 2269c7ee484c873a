"""Ranges and marks as CuPy takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddp.cuda import nvtx


def test_what_a_profiler_is_told(gpu: Any) -> None:
    told: list[Any] = []
    names = {"Mark": "mark", "RangePush": "push", "RangePop": "pop", "RangeStart": "start", "RangeEnd": "end"}
    calls = {name: lambda *args, what=what: told.append((what, *args)) or 7 for name, what in names.items()}
    gpu.cupy.cuda.nvtx = SimpleNamespace(available=True, **calls)
    with nvtx.range("step {}", 3):
        assert nvtx.range_push("inside") == 1
        nvtx.mark("here")
        assert nvtx.range_pop() == 1
    nvtx.range_end(nvtx.range_start("long"))
    pushed = [("push", "step 3"), ("push", "inside"), ("mark", "here"), ("pop",), ("pop",)]
    assert told == [*pushed, ("start", "long", None), ("end", 7)]
    gpu.cupy.cuda.nvtx.available = False
    nvtx.mark("not told")
    assert len(told) == 7
