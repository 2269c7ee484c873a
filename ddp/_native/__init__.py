"""Kernels for the CPU in one C file, `kernels.c`: built when the package is installed, if there is a compiler.

Without them everything runs by the array formulas of `ddp.ops`. `register` gives ops their native forms.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from collectives.native import load

library, missing = load(Path(__file__).parent, "kernels")


def install() -> None:
    """Gives ops their native forms, if there are any."""
    global library, missing
    if library is not None:
        try:
            importlib.import_module("ddp._native.register")
        except AttributeError as error:  # it looks up every kernel before it attaches one
            library, missing = None, f"they are older than this source ({error}): install the package again"
