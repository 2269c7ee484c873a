"""Every CUDA source compiles for the GPUs we know, without one: by NVIDIA's run-time compiler from a wheel."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import ddp
import ddp._cuda.register  # defines the kernels
from ddp._cuda import optimizer_kernels
from ddp._cuda.raw_kernel import KERNEL_SOURCES
from ddp.optim.formula import compile_formula
from tests.ddp.cuda import nvrtc

SOURCES = dict(KERNEL_SOURCES)
needs_nvrtc = pytest.mark.skipif(
    nvrtc.LIBRARY is None or nvrtc.HEADERS is None,
    reason="NVRTC and its headers are not installed: pip install '.[nvrtc]'",
)
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.M)
# What comes as double is narrowed first; arithmetic on doubles is a 32nd as fast on many GPUs, or less.
DOUBLE = re.compile(r"^\s*(?:add|sub|mul|fma|div|sqrt|rcp)\.(?:\w+\.)*f64 ", re.M)
MAY_USE_DOUBLES = {"entropy", "update"}  # a few numbers a row


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("SparseAdam", {"maximize": True}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
    ("NAdam", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}),
]


def _make_updates() -> None:
    """The kernels of an optimizer are made of its formula when it first makes a step."""
    p = ddp.ones(1, requires_grad=True)
    for name, settings in OPTIMIZERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SparseAdam says that gradients are dense
            optimizer = getattr(ddp.optim, name)([p], **settings)
        [group] = optimizer.param_groups
        formula = compile_formula(tuple(optimizer.formula(group)), optimizer.states(group), optimizer.factor)
        parts = map(tuple, (formula.device_lines, formula.scalars, formula.settings, formula.states))
        SOURCES[f"update {name} {settings}"] = optimizer_kernels.kernels(*parts, formula.factor)


_make_updates()


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
    if dtype != "float64" and name.split()[0] not in MAY_USE_DOUBLES:
        assert DOUBLE.findall(ptx) == []


@needs_nvrtc
def test_what_is_wrong_is_said() -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        nvrtc.compiled('extern "C" __global__ void broken() { nonsense; }', ("-arch=sm_80",))
