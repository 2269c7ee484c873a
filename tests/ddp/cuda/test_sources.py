"""Every CUDA source compiles for the GPUs we know, without one: by NVIDIA's run-time compiler from a wheel."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ddp.ops import activation, piecewise
from ddp.ops.cuda import SOURCES, curves
from ddp.ops.cuda.pointwise import OPTIONS
from tests.ddp.cuda import nvrtc
from tests.ddp.cuda.typed import sources

needs_nvrtc = pytest.mark.skipif(
    nvrtc.LIBRARY is None or nvrtc.HEADERS is None,
    reason="NVRTC and its headers are not installed: pip install '.[nvrtc]'",
)
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.M)
# What comes as double is narrowed first; arithmetic on doubles is a 32nd as fast on many GPUs, or less.
DOUBLE = re.compile(r"^\s*(?:add|sub|mul|fma|div|sqrt|rcp)\.(?:\w+\.)*f64 ", re.M)
MAY_USE_DOUBLES = {"advancing", "entropy"}  # a few numbers a row


def _each() -> Iterator[Any]:
    """Every source for both architectures with one dtype each, in turn; with every dtype if --long is given."""
    for i, (name, source) in enumerate(SOURCES.items()):
        for dtype in source.dtypes:
            for k, architecture in enumerate(("sm_80", "sm_90")):
                spared = dtype != source.dtypes[(i + k) % len(source.dtypes)]
                yield pytest.param(name, dtype, architecture, marks=[pytest.mark.long] if spared else [])


@needs_nvrtc
@pytest.mark.parametrize(("name", "dtype", "architecture"), [*_each()])
def test_compiles(name: str, dtype: str, architecture: str) -> None:
    source = SOURCES[name]
    ptx = nvrtc.compiled(source.text(dtype), (*source.options, f"-arch={architecture}"))
    assert ENTRY.search(ptx), "no kernel in it"
    if dtype != "float64" and name not in MAY_USE_DOUBLES:
        assert DOUBLE.findall(ptx) == []


GENERATED = ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
LARGE_ANGLES = {"sin", "cos", "tan", "sin_dx", "cos_dx"}  # whose turns CUDA takes off in double
SHARE = 12  # of the generated kernels, which one in so many is compiled; --long compiles all


@needs_nvrtc
@pytest.mark.parametrize("dtype", GENERATED)
def test_generated_kernels_compile(dtype: str, request: pytest.FixtureRequest) -> None:
    texts = [text for name, text in sources(dtype).items() if name not in LARGE_ANGLES or dtype == "float64"]
    if not request.config.getoption("--long"):
        texts = texts[GENERATED.index(dtype) :: SHARE]
    architecture = "sm_80" if dtype == "float32" else "sm_90"
    ptx = nvrtc.compiled(together(texts), (*OPTIONS, f"-arch={architecture}"))
    assert len(ENTRY.findall(ptx)) >= len(texts)
    if dtype != "float64":
        assert DOUBLE.findall(ptx) == []
    if dtype == "bfloat16":
        assert ".v4." in ptx  # 16 bytes at a time


def together(texts: list[str]) -> str:
    """One source of many: a namespace for each, below the headers of all."""
    headers, spaces = {}, []
    for i, text in enumerate(texts):
        lines = text.splitlines()
        headers |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        spaces.append(f"namespace source{i} {{\n{body}\n}}")
    return "\n".join([*headers, *spaces])


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
