"""Kernels for the CPU in one C file, `kernels.c`: built when the package is installed, if there is a compiler.

Without them everything runs by the array formulas of `ddp.ops`. `register` gives ops their native forms.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
from pathlib import Path

LEVELS = {
    # What each build asks of the CPU, the best first.
    "kernels-x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"},
    "kernels-x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
}


def cpu_flags() -> set[str]:
    """What the CPU can do, as /proc/cpuinfo names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def builds() -> list[Path]:
    """The builds that are installed and that this CPU runs, the best first."""
    folder = Path(__file__).parent
    if platform.machine() not in ("x86_64", "AMD64"):
        names = ["kernels"]
    else:
        flags = cpu_flags()
        names = [name for name, needed in LEVELS.items() if needed <= flags]
    return [path for name in names if (path := folder / f"{name}.so").exists()]


def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why there is none."""
    found = builds()
    if not found:
        installed = sorted(path.name for path in Path(__file__).parent.glob("kernels*.so"))
        if installed:
            return None, f"this CPU runs none of {', '.join(installed)}: they need AVX2 and FMA"
        return None, "they were not built: install a C compiler (gcc), then this package again"
    try:
        return ctypes.CDLL(str(found[0])), ""
    except OSError as error:
        return None, f"{found[0].name} cannot be loaded: {error}"


library, missing = load()


def install() -> None:
    """Gives ops their native forms, if there are any."""
    global library, missing
    if library is not None:
        try:
            importlib.import_module("ddp._native.register")
        except AttributeError as error:  # it looks up every kernel before it attaches one
            library, missing = None, f"they are older than this source ({error}): install the package again"
