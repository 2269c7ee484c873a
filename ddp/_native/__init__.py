"""Kernels for the CPU, in `kernels.c` and the files that it includes: built at installation, if there is a compiler.

Without them, the array formulas of `ddp.ops` run. `register` attaches the native kernels to ops.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any

from collectives.native import load

library, missing = load(Path(__file__).parent, "kernels")


def _set_thread_pool(kernels: ctypes.CDLL) -> None:
    """Makes kernels run on the threads of NumPy's OpenBLAS, if it was built with pthreads; else on one thread.

    Kernels that clang compiled run on one thread in any case.
    """
    set_thread_pool = kernels.set_thread_pool
    products = sys.modules.get("numpy._core._multiarray_umath")  # a private module of NumPy, which may move
    if products is None:
        return
    blas = ctypes.CDLL(products.__file__)  # also finds symbols of the libraries that it is linked with
    count_threads = _thread_count_of(blas)
    if count_threads is not None and hasattr(blas, "gotoblas_pthread"):
        set_thread_pool(blas.gotoblas_pthread, count_threads)


def _thread_count_of(blas: ctypes.CDLL) -> Any:
    """The function of OpenBLAS that returns its number of threads; None if `blas` is another library."""
    for name in [f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")]:
        if hasattr(blas, name):
            return getattr(blas, name)
    return None


def blas_threads() -> int | None:
    """The number of threads on which NumPy multiplies matrices; None if it is unknown."""
    products = sys.modules.get("numpy._core._multiarray_umath")
    count = None if products is None else _thread_count_of(ctypes.CDLL(products.__file__))
    return None if count is None else int(count())


def install() -> None:
    """Attaches the native kernels to ops, if the C functions that they call could be loaded."""
    global library, missing
    if library is not None:
        try:
            _set_thread_pool(library)
            importlib.import_module("ddp._native.register")
        except AttributeError as error:
            # A C function is missing. `register` looks up all of them before it attaches a kernel.
            library = None
            missing = f"they are older than this source ({error}): install the package again"
