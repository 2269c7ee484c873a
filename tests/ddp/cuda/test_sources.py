"""Every CUDA source compiles for the GPUs we know, without one: by NVIDIA's run-time compiler from a wheel."""

from __future__ import annotations

import inspect
import re

import pytest

from ddp.ops import activation, piecewise
from ddp.ops.cuda import SOURCES, curves
from tests.ddp.cuda import nvrtc

needs_nvrtc = pytest.mark.skipif(
    nvrtc.LIBRARY is None or nvrtc.HEADERS is None,
    reason="NVRTC and its headers are not installed: pip install '.[nvrtc]'",
)
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.M)
# What comes as double is narrowed first; arithmetic on doubles is a 32nd as fast on many GPUs, or less.
DOUBLE = re.compile(r"^\s*(?:add|sub|mul|fma|div|sqrt|rcp)\.(?:\w+\.)*f64 ", re.M)
MAY_USE_DOUBLES = {"entropy"}  # a few numbers a row


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("name", "dtype"), [(name, each) for name in SOURCES for each in SOURCES[name].dtypes])
def test_compiles(name: str, dtype: str, architecture: str) -> None:
    source = SOURCES[name]
    ptx = nvrtc.compiled(source.text(dtype), (*source.options, f"-arch={architecture}"))
    assert ENTRY.search(ptx), "no kernel in it"
    if dtype != "float64" and name not in MAY_USE_DOUBLES:
        assert DOUBLE.findall(ptx) == []


@needs_nvrtc
def test_what_is_wrong_is_said() -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        nvrtc.compiled('extern "C" __global__ void broken() { nonsense; }', ("-arch=sm_80",))


def test_every_curve_is_a_function_of_tiles() -> None:
    tiles = {
        name.removeprefix("_").removesuffix("_tile")
        for module in (activation, piecewise)
        for name, _ in inspect.getmembers(module, inspect.isfunction)
        if name.endswith("_tile")
    }
    assert tiles == set(curves.CURVES) | set(curves.SLOPES)
