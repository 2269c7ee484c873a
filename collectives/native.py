"""Native code for the CPU: a loader of compiled libraries, which `ddp` uses too, and conversions of 16-bit floats.

The libraries are built when the package is installed, if there is a compiler. Without the library of
`conversions.c`, NumPy and ml_dtypes convert to the same bits, so ranks with it and ranks without it agree.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
# The CPU features that each build needs, the best build first.
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
}


def cpu_flags() -> set[str]:
    """The CPU's features, as /proc/cpuinfo names them; empty if it cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def builds(folder: Path, name: str) -> list[Path]:
    """The installed builds of a library that this CPU can run, the best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        names = [name]
    else:
        flags = cpu_flags()
        names = [f"{name}-{level}" for level, needed in LEVELS.items() if needed <= flags]
    return [path for build in names if (path := folder / f"{build}.so").exists()]


def load(folder: Path, name: str) -> tuple[ctypes.CDLL | None, str]:
    """Loads the best build of a library. Returns: the library and "", or None and the reason why that failed."""
    usable = builds(folder, name)
    if not usable:
        installed = sorted(path.name for path in folder.glob(f"{name}*.so"))
        if installed:
            return None, f"this CPU runs none of {', '.join(installed)}: they need AVX2 and FMA"
        return None, "they were not built: install a C compiler (gcc), then this package again"
    try:
        return ctypes.CDLL(str(usable[0])), ""
    except OSError as error:
        return None, f"{usable[0].name} cannot be loaded: {error}"


_addressof = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer


def address(x: Any) -> int | None:
    """The memory address of the array's first item; None for None."""
    if x is None:
        return None
    try:
        # About four times as fast as x.ctypes.data.
        return _addressof(_from_buffer(x))
    except (BufferError, TypeError, ValueError):  # not contiguous, read-only, empty, or bfloat16
        return int(x.ctypes.data)


# bfloat16 to float32 is left to ml_dtypes, whose loop is as fast.
_KERNELS = {
    (FLOAT16, FLOAT32): "widen_f16",
    (FLOAT32, BFLOAT16): "narrow_bf16",
    (FLOAT32, FLOAT16): "narrow_f16",
}
# Up to this many numbers NumPy is faster than calling a kernel.
_FEW = 256
_library, _ = load(Path(__file__).parent, "conversions")
_conversions = {pair: getattr(_library, name) for pair, name in _KERNELS.items() if hasattr(_library, name)}
for _kernel in _conversions.values():
    _kernel.argtypes = (ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p)
    _kernel.restype = None


def copy(target: Array, source: Array) -> None:
    """Copies source into target, converted to target's dtype. Both must have the same shape and share no memory."""
    convert = _conversions.get((source.dtype, target.dtype))
    a = source.flags
    b = target.flags
    plain = a.c_contiguous and a.aligned and b.c_contiguous and b.aligned and b.writeable
    if convert is not None and plain and source.size == target.size > _FEW:
        # As bytes: `address` first tries the buffer protocol. bfloat16 arrays lack it, and trying takes microseconds.
        convert(source.size, address(source.view(np.uint8)), address(target.view(np.uint8)))
    else:
        np.copyto(target, source, casting="unsafe")


def astype(x: Array, dtype: np.dtype[Any], order: Literal["C", "K"] = "K") -> Array:
    """A copy of x, converted to `dtype`. order: the memory layout of the copy, as in NumPy"""
    if (x.dtype, dtype) not in _conversions or x.size <= _FEW or not x.flags.c_contiguous:
        return x.astype(dtype, order=order)
    out = np.empty(x.shape, dtype)
    copy(out, x)
    return out
