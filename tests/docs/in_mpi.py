"""Runs both sides of a page on this rank of an MPI job, pair by pair, and compares: `in_mpi.py PAGE`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.testing import assert_allclose

import collectives
from tests.docs.blocks import pairs
from tests.docs.snippets import Builder, of_ours, outcome, run


def builders(rank: int) -> dict[str, Builder]:
    """The names that a snippet with mpi4py may use."""
    from mpi4py import MPI

    return {"MPI": lambda get: MPI, "np": lambda get: np, "comm": lambda get: MPI.COMM_WORLD, "rank": lambda get: rank}


def main(page: Path) -> None:
    comm = collectives.init(timeout=30.0)
    compared = 0
    for theirs, mine in pairs(page):
        if mine.is_script:
            continue
        got = outcome(run(mine.compiled(), mine.code, of_ours(comm)))
        if theirs is None:
            continue
        expected = outcome(run(theirs.compiled(), theirs.code, builders(comm.rank)))
        names = got.keys() & expected.keys()
        assert names, f"{theirs.place} and {mine.place} have no result in common"
        for name in sorted(names):
            assert_allclose(got[name], expected[name], rtol=1e-12, err_msg=f"{mine.place}: {name}")
        compared += len(names)
    least = comm.all_reduce(np.array(compared), "min")
    if comm.rank == 0:  # alone, since a bare mpiexec mixes the ranks' lines
        print(f"{comm.size} ranks compared {least} results")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
