"""The sources of the generated kernels, in the dtypes that ops are given: for NVRTC, and for the emulator at once."""

from __future__ import annotations

from ddp.ops.cuda.pointwise import KERNELS, Elementwise
from ddp.ops.cuda.pointwise_pairs import BACKWARDS
from ddp.ops.cuda.pointwise_source import computed_in

INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
_HELD = {"float": "float32", "double": "float64"}


def sources(dtype: str) -> dict[str, str]:
    """Of every kernel that takes arrays of this dtype: the text, by the kernel's name."""
    for backward in BACKWARDS:
        backward.every()
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
