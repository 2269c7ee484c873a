"""Cores: how they are split among ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.backends.mpi.mpi_world import BLAS_VARIABLES, blas_threads, count_own_cores


def bound(*masks: set[int]) -> list[frozenset[int]]:
    return [frozenset(mask) for mask in masks]


EIGHT = set(range(8))


@pytest.mark.parametrize(
    ("node", "shares"),
    [
        (bound(EIGHT), [8]),
        (bound(EIGHT, EIGHT), [4, 4]),
        (bound(*[set(range(49))] * 49), [1] * 49),  # 49 times 1/49 is less than 1 to a computer
        (bound({0, 1, 2, 3}, {4, 5, 6, 7}), [4, 4]),  # an engine has split them already
        (bound({0}, {0}), [1, 1]),
        (bound({0, 1, 2}, {2, 3}), [2, 1]),  # core 2 is half each one's
    ],
)
def test_a_core_is_split_among_the_ranks_that_may_run_on_it(node: list[frozenset[int]], shares: list[int]) -> None:
    assert [count_own_cores(node, rank) for rank in range(len(node))] == shares


@pytest.mark.parametrize(
    ("node", "environ", "expected"),
    [
        (bound(EIGHT, EIGHT), {}, 4),
        (bound(EIGHT, EIGHT), {"OMP_NUM_THREADS": "8"}, None),
        (bound(EIGHT, EIGHT), {"MKL_NUM_THREADS": "1"}, None),
        (bound(EIGHT, EIGHT), {"OMP_NUM_THREADS": ""}, 4),
        (bound(EIGHT), {}, None),  # alone on its node: BLAS has found the cores by itself
        (bound({0, 1}, {2, 3}), {}, None),
    ],
)
def test_threads_are_limited_where_nobody_else_has(
    node: list[frozenset[int]], environ: dict[str, str], expected: Any
) -> None:
    assert blas_threads(node, 0, environ) == expected


PROBE = """
import os, sys
import numpy as np
import collectives
before = "threadpoolctl" in __import__("sys").modules
comm = collectives.init()
imported = "threadpoolctl" in __import__("sys").modules and not before
import threadpoolctl
threads = {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}
with open(f"{sys.argv[1]}/{comm.rank}", "w") as file:  # an engine would tear lines
    file.write(f"{sorted(threads)} {os.environ.get('OMP_NUM_THREADS')} {imported}")
"""


@pytest.mark.mpi
def test_ranks_that_no_launcher_started_share_the_cores(run_job: Any, mpiexec: list[str], tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    cpus = len(os.sched_getaffinity(0))
    if cpus < 2:
        pytest.skip("one core cannot be shared out")

    start = [*mpiexec, "--bind-to", "none", "-n", "2", sys.executable, str(tmp_path / "probe.py"), str(tmp_path)]
    unbound = {**dict.fromkeys(BLAS_VARIABLES, ""), "OMPI_MCA_hwloc_base_binding_policy": "none"}
    run_job(start, timeout=30, env=unbound, code=0)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [f"[{cpus // 2}] {cpus // 2} True"] * 2
