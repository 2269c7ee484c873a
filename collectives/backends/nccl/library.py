"""Where libnccl comes from. The library is one; who finds it differs from one installation to the next.

    "pynccl"  the binding pynccl finds and loads it (through numba, which must be installed with it)
    "cupy"    the one that `cupy.cuda.nccl` is linked to
    "path"    a file that the caller names, else that of the package nvidia-nccl-cu12 or -cu13, else the system's

Of the bindings only the library itself is used; the functions are declared by `table`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from collectives.backends.nccl.table import Nccl
from collectives.errors import ArgumentError, BackendError

_SONAME = "libnccl.so.2"
_PYNCCL_LOOKS_IN = "NUMBA_NCCLLIB"


def load(source: str = "auto", path: str | os.PathLike[str] | None = None) -> Nccl:
    """The library under the table.

    source: "pynccl", "cupy", "path", or "auto": the first of these that works, in this order
    path: the library's file; with "path", or with "auto", which then looks nowhere else
    Raises: ArgumentError for another source; BackendError if none works, with everything that was tried and why it
    failed.
    """
    if source not in ("auto", *_WAYS):
        raise ArgumentError(f"source should be auto, {', '.join(_WAYS)}, is {source!r}")
    if path is not None:
        if source not in ("auto", "path"):
            raise ArgumentError(f'a path goes with source="path", not with {source!r}')
        ways: dict[str, Callable[[], ctypes.CDLL]] = {"path": lambda: ctypes.CDLL(os.fspath(path))}
    else:
        ways = _WAYS if source == "auto" else {source: _WAYS[source]}
    tried = []
    for name, way in ways.items():
        try:
            dll = way()
            return Nccl(dll, dll._name)
        except Exception as error:  # pynccl, numba and CuPy raise whatever they like
            tried.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    wanted = f"{_SONAME} of {os.fspath(path)}" if path is not None else _SONAME
    raise BackendError(f"NCCL cannot be used: {wanted} could not be loaded. Tried " + "; ".join(tried))


def wheel() -> Path | None:
    """The library's file in the package nvidia-nccl-cu12 or -cu13, None if neither is installed."""
    spec = importlib.util.find_spec("nvidia")
    for home in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(home).glob(f"*/lib/{_SONAME}")):
            return found
    return None


def _by_pynccl() -> ctypes.CDLL:
    with _shown_to_pynccl(wheel()):
        from pynccl import binding

        return binding.libnccl().dll  # its other classes want a numba context, and declare counts as 32-bit integers


@contextlib.contextmanager
def _shown_to_pynccl(library: Path | None) -> Iterator[None]:
    """pynccl looks in one directory, and in sys.prefix/lib if it is given none; the user's own choice stands."""
    if library is None or _PYNCCL_LOOKS_IN in os.environ:
        yield
        return
    os.environ[_PYNCCL_LOOKS_IN] = str(library.parent)
    try:
        yield
    finally:
        del os.environ[_PYNCCL_LOOKS_IN]


def _by_cupy() -> ctypes.CDLL:
    from cupy.cuda import nccl

    if not nccl.available:
        raise BackendError("this CuPy has no NCCL: its own loader found no library, or it was built without")
    extension = sys.modules[nccl.NcclCommunicator.__module__].__file__
    return ctypes.CDLL(extension)  # symbols are looked up in what it is linked to as well


def _by_path() -> ctypes.CDLL:
    found = wheel()
    return ctypes.CDLL(_SONAME if found is None else str(found))


_WAYS: dict[str, Callable[[], ctypes.CDLL]] = {"pynccl": _by_pynccl, "cupy": _by_cupy, "path": _by_path}
