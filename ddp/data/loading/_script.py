"""The user's script in another process: imported only where something that it defines is needed there.

It runs there under the name `__mp_main__`, as with the standard library, so that what stands below
`if __name__ == "__main__"` does not.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from types import ModuleType
from typing import NamedTuple

from ddp.errors import ArgumentError

NAME = "__mp_main__"

_importing = False


class Script(NamedTuple):
    """How the script is found: by its path, or as `python -m` does, by the name of a module."""

    module: str | None
    path: str | None


def current() -> Script:
    """The script of this process. Raises: ArgumentError if it has none, as an interactive session."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if isinstance(spec, importlib.machinery.ModuleSpec):
        return Script(spec.name, None)
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):
        raise ArgumentError(
            "num_workers: the dataset, collate_fn or worker_init_fn is defined in an interactive session, where no"
            " worker process finds it: move it to a module that can be imported, or take num_workers=0"
        )
    return Script(None, os.path.abspath(path))


def run(script: Script) -> None:
    """Imports the script; from now on it is `__main__`. Raises: whatever the script raises."""
    global _importing
    if script.module is not None and script.module.split(".")[-1] == "__main__" and script.path is None:
        sys.modules["__main__"] = sys.modules[NAME] = ModuleType(NAME)
        return  # what a package does when it is run defines nothing that is pickled by that name
    _importing = True
    try:
        main = ModuleType(NAME)
        if script.module is not None:
            content = runpy.run_module(script.module, run_name=NAME, alter_sys=True)
        else:
            assert script.path is not None
            content = runpy.run_path(script.path, run_name=NAME)
        main.__dict__.update(content)
        sys.modules["__main__"] = sys.modules[NAME] = main
    finally:
        _importing = False


def refuse_while_imported() -> None:
    """Raises: ArgumentError in a script that a worker imports and that is about to start workers of its own."""
    if _importing:
        raise ArgumentError(
            "this script starts a DataLoader's worker processes wherever it is imported, and workers import it, because"
            ' it defines their dataset. Put what it runs below `if __name__ == "__main__":`, or the dataset into a'
            " module of its own"
        )
