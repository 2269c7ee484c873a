"""The sources of kernels, in the dtypes that ops are given, compiled for the emulator at once."""

from __future__ import annotations

import functools

from ddp._cuda.raw_kernel import KERNEL_SOURCES as SOURCES
from tests.ddp.cuda import emulation


@functools.cache
def prepare(*dtypes: str) -> None:
    """Has the emulator compile the kernels of these dtypes, each dtype's at once, if there is a compiler."""
    if emulation.COMPILER is not None:
        for dtype in dtypes:
            emulation.prepare([source.text(dtype) for source in SOURCES.values() if dtype in source.dtypes])
