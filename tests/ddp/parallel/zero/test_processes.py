"""The same equality where ranks are processes, and read each other's gradients and parameters in shared memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import collectives
from ddp import optim
from tests.ddp.parallel.zero.training import assert_equal, optimizer_of, replan, train, wrapped


@pytest.mark.mpi
def test_ranks_that_are_processes(run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str]) -> None:
    done = run_job([*mpiexec, "-n", "2", sys.executable, __file__], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 2


def main() -> None:
    comm = collectives.init()
    results = []
    for sharded in (False, True):
        model = wrapped(comm, seed=comm.rank)
        optimizer = optimizer_of(model, sharded, optim.AdamW, lr=0.01)
        results.append(train(model, optimizer, range(5), lambda step, model=model: move(model, step)))
        model.close()
    assert_equal(results[1], results[0])
    print("equal", flush=True)


def move(model: object, step: int) -> None:
    if step == 3:
        replan(model, step)  # type: ignore[arg-type]  # a lambda's default has no type


if __name__ == "__main__":
    main()
