"""Which line of user code an error came through, and which op of ours that line called."""

from __future__ import annotations

import os
import sys

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep  # contextlib, say
_WRAPPERS = ("inner", "hooked", "guarded_run")  # they bear another name than what they call


def origin(error: BaseException) -> tuple[str, str]:
    """The op, and the line that called it: ("item", "train.py:88 (`loss.item()`)")."""
    import linecache  # for this error alone
    import traceback

    below = _below()
    line, op = "an unknown line", "this"
    within = True
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if name.endswith((".pyx", ".pxi")) or any(name.startswith(each) for each in below):
            break  # compiled modules name their sources
        if name.startswith(_STANDARD) and "-packages" not in name:
            continue
        if name.startswith(_OURS):
            if not within or op in _WRAPPERS:
                op, within = frame.f_code.co_name, True
            continue
        code = linecache.getline(name, number).strip()
        line, op, within = f"{name}:{number}" + (f" (`{code}`)" if code else ""), op, False
    return op, line


def _below() -> list[str]:
    """Where the modules lie that ops call, and that are no users' code."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("cupy", "cupy_backends", "numpy")]
    return [os.path.dirname(each) + os.sep for each in files if each]
