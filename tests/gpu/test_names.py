"""The stand-in offers nothing that CuPy does not have: by a list of CuPy's names, and that list by CuPy itself."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.gpu.kinds import names

#: What only tests see.
OURS = {
    *(
        "machine",
        "devices",
        "capacity",
        "local",
        "record",
        "arenas",
        "pinned",
        "held",
        "capturing",
        "captured",
        "captures",
        "owners",
    ),
    *("defaults", "null", "blocks", "places", "naming", "fault", "pool", "pinned_pool", "current", "handle", "finish"),
    *("device_at", "streams_of", "deferred", "put", "wait", "refuse_capture", "allocator", "events", "cupyx", "errors"),
}


def test_of_the_stand_in(gpu: Any) -> None:
    cupy = gpu.cupy
    offered = {
        "cupy": {name for name in [*vars(cupy), *vars(type(cupy))] if not name.startswith("_")} - OURS,
        "cupy.ndarray": {name for each in cupy.ndarray.__mro__[:-1] for name in vars(each) if not name.startswith("_")},
    }
    for where, what in {
        "cupy.cuda": cupy.cuda,
        "cupy.cuda.runtime": cupy.cuda.runtime,
        "cupy.cuda.memory": cupy.cuda.memory,
        "cupy.cuda.pinned_memory": cupy.cuda.pinned_memory,
        "cupy.cuda.stream": cupy.cuda.stream,
        "cupy.cuda.Stream": cupy.cuda.Stream,
        "cupy.cuda.Event": cupy.cuda.Event,
        "cupy.cuda.Device": cupy.cuda.Device,
        "cupy.cuda.MemoryPool": cupy.cuda.MemoryPool,
        "cupy.random": cupy.random,
        "cupy.random.Generator": cupy.random.Generator,
        "cupyx": cupy.cupyx,
    }.items():
        offered[where] = {name for name in vars(what) if not name.startswith("_")}
    missing = {where: sorted(found - names()[where]) for where, found in offered.items()}
    assert {where: found for where, found in missing.items() if found} == {}


def test_of_cupy() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    for where, expected in names().items():
        module, _, rest = where.partition(".")
        found: Any = importlib.import_module(module)
        for part in rest.split(".") if rest else ():
            if isinstance(found, ModuleType) and not hasattr(found, part):
                found = importlib.import_module(f"{found.__name__}.{part}")
            else:
                found = getattr(found, part)
        missing = sorted(name for name in expected if not hasattr(found, name))
        assert not missing, f"{where} has no {missing}"
