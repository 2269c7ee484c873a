"""A rank that tries every collective and times all_reduce; rank 0 prints the results."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import platform
import sys
from collections.abc import Sequence
from typing import Any

from collectives import Communicator, init
from launcher.bench.collective_table import COLLECTIVES
from launcher.bench.runner import run
from launcher.bench.settings import Settings
from launcher.doctor.machine import versions
from launcher.doctor.probes import print_answer

_HOST_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
_DEVICE_DTYPES = ("float32", "float16", "int32")
# The size of the arrays whose results are compared, in bytes.
_CHECKED = 4096
TIMED = Settings(collectives=("all_reduce",), place="in", minbytes=16, maxbytes=16 << 20, stepfactor=32, warmup=2)


def main(argv: Sequence[str]) -> None:
    """Runs one rank. argv: the backend, and the seconds after which the rank ends in any case"""
    backend, limit = argv
    faulthandler.dump_traceback_later(float(limit), exit=True)  # the launcher may have been killed
    comm = init(backend, timeout=float(limit) / 2)
    with contextlib.redirect_stdout(io.StringIO()):  # without the tables of the benchmark
        results = try_collectives(comm)
    if comm.rank == 0:
        print_answer(results)


def try_collectives(comm: Communicator) -> dict[str, Any]:
    """Tries every collective that this number of ranks allows, and times all_reduce. Collective.

    wrong: [collective, dtype, number of wrong elements]; tried, dtypes: numbers of collectives and dtypes tried
    refused: sentences about what the backend cannot do; timed: [bytes, seconds] of all-reduces of float32, in place
    nodes: how many; versions: by host
    """
    dtypes = _DEVICE_DTYPES if comm.backend == "nccl" else _HOST_DTYPES
    names = tuple(name for name, collective in COLLECTIVES.items() if collective.least_ranks <= comm.size)
    checked = Settings(
        collectives=names, dtype=dtypes, minbytes=_CHECKED, maxbytes=_CHECKED, check=True, iters=1, warmup=1
    )
    outcome = run(comm, checked)
    wrong = [[row.collective, row.dtype, row.wrong] for row in outcome.rows if row.wrong]
    timed = [[row.size, row.seconds] for row in run(comm, TIMED).rows]
    return {
        "wrong": wrong,
        "tried": len(names),
        "dtypes": len(dtypes),
        "refused": list(outcome.unsupported),
        "timed": timed,
        "nodes": outcome.nodes,
        "versions": dict(comm.all_gather_object((platform.node(), versions()))),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
