"""NCCL, loaded in each of the ways in which `collectives` would."""

from __future__ import annotations

from typing import Any

from collectives._nccl import library
from collectives.errors import CollectivesError
from launcher.doctor.aside import answer

_SOURCES = ("pynccl", "cupy", "path")  # in the order in which they are tried


def look() -> dict[str, Any]:
    """found: source → [version, file]; failed: source → why."""
    found, failed = {}, {}
    for source in _SOURCES:
        try:
            nccl = library.load(source)
        except CollectivesError as failure:
            failed[source] = str(failure).partition(f"{source}: ")[2]
        else:
            found[source] = [".".join(map(str, nccl.version)), nccl.path]
    return {"found": found, "failed": failed}


if __name__ == "__main__":
    answer(look)
