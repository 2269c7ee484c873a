"""NVIDIA's run-time compiler from a wheel, by ctypes: it compiles without a GPU, a driver, or CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _inside(package: str, pattern: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return next((result for place in places for result in sorted(Path(place).glob(pattern))), None)


LIBRARY = _inside("nvidia.cuda_nvrtc", "lib/libnvrtc.so.*")
HEADERS = _inside("nvidia.cuda_runtime", "include/cuda_fp16.h")


def compiled(text: str, options: Sequence[str]) -> str:
    """The PTX of a source. Raises: AssertionError with the compiler's log."""
    assert LIBRARY is not None
    assert HEADERS is not None
    library: Any = ctypes.CDLL(str(LIBRARY))
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None) == 0
    given = [option.encode() for option in (*options, f"-I{HEADERS.parent}")]
    status = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
    assert status == 0, log
    ptx = _text(library.nvrtcGetPTXSize, library.nvrtcGetPTX, program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert "warning" not in log, log
    return ptx


def _text(size_of: Any, read: Any, program: Any) -> str:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert read(program, buffer) == 0
    return buffer.value.decode()
