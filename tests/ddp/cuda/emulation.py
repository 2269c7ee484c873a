"""CUDA sources on the CPU: a C++ compiler makes `cupy.RawKernel` for NumPy's arrays; the stand-in for CuPy runs them.

A launch is checked as CuPy cannot check it: the number of arguments, and what each pointer points to, against the
source.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp._cuda.raw_kernel import KERNEL_SOURCES

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
THREADS = 5  # of a block: no power of two, and fewer than any row that is worth a test

_ENTRY = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
_DTYPES = {
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
    "unsigned long long": "int64",
    "Index": "int64",
    "bool": "bool",
    "int": "int32",
}


def _expanded(text: str) -> str:
    """The source after the preprocessor, without what it includes."""
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("#include"))
    return " ".join(_made(bare, ("-E", "-P", "-xc++"), ".ii").read_text().split())


def _entries(expanded: str) -> dict[str, list[str]]:
    """Of every kernel in an expanded source: the types of its parameters."""
    result = {}
    for name, parameters in _ENTRY.findall(expanded):
        result[name] = [each.strip().rpartition(" ")[0].removeprefix("const ") for each in parameters.split(",")]
    return result


def _door(name: str, kinds: Sequence[str]) -> str:
    """What ctypes calls a kernel by."""
    given = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(kinds))
    return (
        f"static void open_{name}(void** a) {{ {name}({given}); }}\n"
        f'extern "C" int run_{name}(unsigned blocks, unsigned threads, void** a) '
        f"{{ return emulator::launch(blocks, threads, open_{name}, a); }}\n"
    )


@functools.cache
def _library(text: str, options: tuple[str, ...]) -> tuple[Any, dict[str, list[str]]]:
    entries = _entries(_expanded(text))
    doors = "".join(_door(name, kinds) for name, kinds in entries.items())
    return _built(f'#include "emulator.h"\n{text}\n{doors}'), entries


def _built(whole: str) -> Any:
    """The shared library of a source."""
    # Without fused multiply-add where the source wants none; NumPy has none either. What a template has of its own in
    # one library is not to be that of another.
    flags = ("-std=c++17", "-O0", "-fPIC", "-fwrapv", "-ffp-contract=off", "-fno-gnu-unique")
    return ctypes.CDLL(str(_made(whole, (*flags, f"-I{_header(flags)}", f"-I{HERE}", "-shared", "-xc++"), ".so")))


@functools.cache
def _header(flags: tuple[str, ...]) -> Path:
    """Where the emulator's header is compiled already, which takes twice as long as most kernels."""
    result = _made("", (*flags, "-xc++-header"), ".gch", str(HERE / "emulator.h"))
    folder = result.with_suffix("")
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(result, folder / "emulator.h.gch")
    return folder


def _made(source: str, flags: tuple[str, ...], suffix: str, file: str = "-") -> Path:
    """What the compiler makes of a source, kept for all processes; one of them makes it, and the others wait."""
    if COMPILER is None:
        pytest.skip("the kernels need g++ to run on the CPU")
    digest = hashlib.sha256(repr((source, flags, (HERE / "emulator.h").read_text())).encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"ddp-kernels-{os.getuid()}"
    made.mkdir(mode=0o700, exist_ok=True)
    target = made / f"{digest}{suffix}"
    if target.exists():
        return target
    with open(made / f"{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            scratch = made / f"{digest}.new"
            command = [COMPILER, *flags, file, "-o", str(scratch)]
            done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=110)
            assert done.returncode == 0, done.stderr
            scratch.rename(target)
    return target


_PREPARED: dict[str, tuple[Any, dict[str, list[str]]]] = {}


def prepare(texts: Sequence[str]) -> None:
    """Compiles many sources at once, whose kernels have names of their own: ten times faster than one by one.

    In one order, and those too that are there already: whoever asks for the same ones finds them compiled.
    """
    texts = sorted({*texts})
    if all(text in _PREPARED for text in texts):
        return
    headers, spaces = [], []
    for i, text in enumerate(texts):
        lines = text.splitlines()
        headers += [line for line in lines if line.startswith("#include")]
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        spaces.append(f"namespace source{i} {{\n{body}\n")
    entries = [_entries(part) for part in re.split(r"namespace source\d+ \{", _expanded("\n".join(spaces)))[1:]]
    for i, each in enumerate(entries):
        spaces[i] += "".join(_door(name, kinds) for name, kinds in each.items()) + "}\n"
    library = _built("\n".join(['#include "emulator.h"', *dict.fromkeys(headers), *spaces]))
    _PREPARED.update({text: (library, each) for text, each in zip(texts, entries, strict=True)})


@functools.cache
def prepare_kernels(*dtypes: str) -> None:
    """Compiles all kernels of ours in these dtypes, each dtype's at once, if there is a compiler."""
    if COMPILER is not None:
        for dtype in dtypes:
            prepare([source.text(dtype) for source in KERNEL_SOURCES.values() if dtype in source.dtypes])


def _types(text: str) -> dict[str, str]:
    """What T and A stand for in a source."""
    return {name: kind for kind, name in re.findall(r"^typedef (.*) (T|A);$", text, re.M)}


class RawKernel:
    """As `cupy.RawKernel`, on NumPy arrays."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        self._library, entries = _PREPARED.get(code) or _library(code, options)
        self._name = name
        self._kinds = entries[name]
        self._names = _types(code)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        assert grid[0] > 0, f"{self._name}: a launch of no blocks"
        assert len(args) == len(self._kinds), f"{self._name}: {len(args)} arguments for {self._kinds}"
        held = [self._held(kind, value, i) for i, (kind, value) in enumerate(zip(self._kinds, args, strict=True))]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(each) for each in held])
        # A few blocks: kernels stride, and each thread is worth a thousand of a GPU's.
        status = self._library[f"run_{self._name}"](min(grid[0], 3), THREADS, pointers)
        assert status == 0, f"{self._name}: threads of a block came to different barriers"

    def _held(self, kind: str, value: Any, i: int) -> Any:
        where = f"{self._name}: argument {i}, {kind}"
        if kind.endswith("*"):
            if isinstance(value, np.int64):
                assert value == 0, where
                return ctypes.c_void_p(None)
            pointee = kind.removesuffix("*").strip()
            pointee = self._names.get(pointee, pointee)
            assert isinstance(value, np.ndarray), where
            assert value.dtype == _DTYPES[pointee], f"{where}: {value.dtype}"
            assert value.flags.c_contiguous, where
            return ctypes.c_void_p(value.ctypes.data)
        if kind == "double":
            assert type(value) is np.float64, where
            return ctypes.c_double(value)
        assert kind == "Index", where
        assert type(value) is np.int64, where
        return ctypes.c_longlong(value)
