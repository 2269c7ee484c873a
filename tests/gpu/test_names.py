"""The stand-in offers nothing that CuPy does not have: by a list of CuPy's names, and that list by CuPy itself."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.gpu.kinds import names
from tests.gpu.making import Making


def test_of_the_stand_in(gpu: Any) -> None:
    cupy = gpu.cupy
    parts = {
        "cupy": Making.__mro__[:-1],
        "cupy.ndarray": cupy.ndarray.__mro__[:-1],
        **{f"cupy.cuda.{name}": [getattr(cupy.cuda, name)] for name in ("runtime", "memory", "Stream", "Event")},
        **{f"cupy.cuda.{name}": [getattr(cupy.cuda, name)] for name in ("Device", "MemoryPool")},
        "cupy.cuda": [cupy.cuda],
        "cupy.random": [cupy.random],
        "cupy.random.Generator": [cupy.random.Generator],
    }
    for where, owners in parts.items():
        offered = {name for owner in owners for name in vars(owner) if not name.startswith("_")}
        assert sorted(offered - names()[where]) == [], where


def test_of_cupy() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    for where, expected in names().items():
        module, _, rest = where.partition(".")
        actual: Any = importlib.import_module(module)
        for part in rest.split(".") if rest else ():
            if isinstance(actual, ModuleType) and not hasattr(actual, part):
                actual = importlib.import_module(f"{actual.__name__}.{part}")
            else:
                actual = getattr(actual, part)
        missing = sorted(name for name in expected if not hasattr(actual, name))
        assert not missing, f"{where} has no {missing}"
