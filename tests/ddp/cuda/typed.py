"""The sources of kernels, in the dtypes that ops are given: for NVRTC, and for the emulator at once."""

from __future__ import annotations

import functools

from ddp.ops.cuda import SOURCES
from ddp.ops.cuda.folding import Reducing
from ddp.ops.cuda.pointwise import KERNELS, Elementwise
from ddp.ops.cuda.pointwise_pairs import BACKWARDS
from ddp.ops.cuda.pointwise_source import computed_in
from tests.ddp.cuda import emulation

INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
_HELD = {"float": "float32", "double": "float64"}


def sources(dtype: str) -> dict[str, str]:
    """Of every generated kernel that takes arrays of this dtype: the text, by the kernel's name."""
    for backward in BACKWARDS:
        backward.every()
    for kernel in [*KERNELS.values()]:
        if isinstance(kernel, Reducing) and not kernel.name.endswith("_joined"):
            kernel._second()  # made when it is first needed
    found = {}
    for name, kernel in [*KERNELS.items()]:
        real = dtype not in INTEGERS
        if isinstance(kernel, Elementwise):
            if real or (kernel.truths if dtype == "bool" else kernel.integers):
                dtypes = ["bool" if each == "c" else dtype for each in kernel.ins]
                out = dtype if kernel.dtype is None else str(kernel.dtype)
                found[name] = kernel.text(dtypes, [out] * len(kernel.outs))
        elif real:
            kind = computed_in([dtype])
            given = _HELD[kind] if name.endswith("_joined") else dtype
            found[name] = kernel.text([given] * len(kernel.ins), dtype, kind)
    return found


@functools.cache
def prepare(*dtypes: str, generated: bool = True) -> None:
    """Has the emulator compile the kernels of these dtypes, each dtype's at once; nothing where there is no compiler.

    generated: those that are made from formulas, too, which takes ten times as long
    """
    if emulation.COMPILER is not None:
        for dtype in dtypes:
            emulation.prepare([source.text(dtype) for source in SOURCES.values() if dtype in source.dtypes])
            if generated:
                # What joins the parts of a long reduction is run by few tests.
                emulation.prepare([text for name, text in sources(dtype).items() if not name.endswith("_joined")])
