"""mpi4py and the MPI that it loads: a wrong one ends the process, and one without its files may hang."""

from __future__ import annotations

import sys
from typing import Any

from launcher.doctor.aside import answer


def look() -> dict[str, Any]:
    """library: what the MPI calls itself; path: its file; threads: all threads may call it at the same time."""
    from mpi4py import MPI  # and starts it

    seen = {
        "library": MPI.Get_library_version().strip("\0 \n"),
        "path": _path(),
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    }
    MPI.Finalize()  # or it leaves its files behind
    return seen


def gpu() -> dict[str, Any]:
    """reason: why this MPI is not handed GPU memory, "" if it has moved it unharmed."""
    from mpi4py import MPI

    from collectives._gpu import probe

    assert MPI.Is_initialized()  # it is loaded, so the probe can ask it
    seen = {"reason": probe.verdict(0)}
    MPI.Finalize()
    return seen


def _path() -> str:
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libmpi" in line.rpartition("/")[2]}
    return min(paths, key=len, default="")


if __name__ == "__main__":
    answer(gpu if sys.argv[1:] == ["gpu"] else look)
