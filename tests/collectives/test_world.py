"""Which engine promised what, and what the first `init` makes of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import collectives
from collectives import ArgumentError, BackendError, run_threads, world
from collectives.backends import single
from collectives.backends.mpi.mpi_world import RankInfo, rank_info_of
from collectives.start import choose_backend
from collectives.world import World
from launcher.engines.mpiexec import MPICH, mpi_family
from launcher.linux import remove_stale_segments
from tests.conftest import Run, has_mpich, wait_until

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ON_HYDRA = World("mpich", 1, 4, 1, 2)
PLAIN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
STEP = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (HYDRA, ON_HYDRA),
        (OMPI, World("openmpi", 3, 4, 1, 2)),
        (STEP, World(engine="slurm", rank=2, size=3, local_rank=0)),
        # A batch script knows how many tasks were asked for, but no step runs there: it is one process.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({**HYDRA, **STEP}, ON_HYDRA),
        (PLAIN, World("environment", 5, 8, 1, 4)),
        ({**PLAIN, **HYDRA}, ON_HYDRA),
        # srun starts one torchrun on each node, and that the ranks.
        ({**PLAIN, **STEP, "TORCHELASTIC_RUN_ID": "none"}, World("environment", 5, 8, 1, 4)),
        # A rank of torchrun has started mpiexec.
        (
            {**PLAIN, **HYDRA, "TORCHELASTIC_RUN_ID": "none", world.WORKER_OF: "5 8 1 4 0 77"},
            ON_HYDRA,
        ),
    ],
)
def test_the_engine_is_read_from_the_environment(environ: dict[str, str], expected: World | None) -> None:
    assert world.world_from_env(environ) == expected


def test_a_variable_that_holds_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="PMI_SIZE should be a whole number, is 'many'"):
        world.world_from_env({"PMI_RANK": "0", "PMI_SIZE": "many"})


def test_only_the_agents_own_child_is_supervised() -> None:
    assert world.supervised({world.AGENT: str(os.getppid())})
    assert not world.supervised({world.AGENT: str(os.getpid())})
    assert not world.supervised({})


def test_seats_are_counted_by_host_name() -> None:
    hosts = [b"a", b"b", b"a", b"b", b"b"]
    seats = [rank_info_of(hosts, rank) for rank in range(5)]
    assert [(seat.local_rank, seat.local_size, seat.node) for seat in seats] == [
        (0, 2, 0),
        (0, 3, 1),
        (1, 2, 0),
        (1, 3, 1),
        (2, 3, 1),
    ]
    assert seats[4] == RankInfo(rank=4, size=5, local_rank=2, local_size=3, node=1)


def test_the_backend_follows_the_promise() -> None:
    two = World(engine="mpich", rank=0, size=2)
    assert [choose_backend("auto", each) for each in (None, two._replace(size=1), two)] == ["single", "single", "mpi"]
    assert choose_backend("mpi", None) == "mpi"


def test_a_backend_asked_for_by_name_never_falls_back() -> None:
    with pytest.raises(BackendError, match='"single" was asked for in a world of 2'):
        single.join(World(engine="mpich", rank=0, size=2), 10.0, None)
    with pytest.raises(BackendError, match="backend should be one of auto, nccl, mpi, single, is 'gloo'"):
        collectives.init("gloo")


def test_init_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ArgumentError, match="check should be"):
        collectives.init(check="never")


def test_init_is_idempotent_and_a_world_of_one_imports_no_mpi(run_job: Run) -> None:
    code = (
        "import sys, collectives\n"
        "a = collectives.init(); assert collectives.init() is a and a.backend == 'single'\n"
        "assert not {'mpi4py', 'cupy', 'pynccl'} & set(sys.modules)\n"
        "try: collectives.init('mpi')\n"
        "except collectives.BackendError as error: print(error)\n"
    )
    done = run_job([sys.executable, "-c", code], code=0)
    assert "backend 'mpi' was asked for, but this process already uses 'single'" in done.stdout


def test_inside_run_threads_init_gives_the_ranks_communicator() -> None:
    assert run_threads(lambda comm: collectives.init() is comm, size=2) == [True, True]


@pytest.mark.mpi
def test_a_world_smaller_than_promised_is_an_error(run_job: Run) -> None:
    # What a rank sees when the other MPI's mpiexec started it.
    rank, size = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if has_mpich() else ("PMI_RANK", "PMI_SIZE")
    code = (
        "import collectives\nfrom collectives.backends.mpi import mpi_world\n"
        "try: collectives.init()\n"
        "finally: print(list(mpi_world.mapped_segment_files()))\n"
    )
    done = run_job([sys.executable, "-c", code], env={rank: "1", size: "2"})
    assert done.returncode != 0
    assert done.stdout == "[]\n"  # it leaves no file behind
    assert "as rank 1 of 2, but MPI sees a world of 1" in done.stderr


@pytest.mark.mpi
def test_a_rank_that_never_calls_init_does_not_hold_the_others_for_ever(
    start_job: Callable[..., object], mpiexec: list[str]
) -> None:
    code = (
        "import time, collectives\nfrom collectives import world\n"
        "if world.world_from_env().rank == 1: time.sleep(15)\n"
        "collectives.init(timeout=3)\n"
    )
    began = time.time()
    done = start_job([*mpiexec, "-n", "2", sys.executable, "-c", code]).wait(timeout=40)
    remove_stale_segments(
        began
    )  # ranks that end within MPI_Init leave their MPI's file; ddp-launch would have removed it
    assert done.returncode != 0
    assert "_join_and_wait_for_every_rank_to_call_init" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("starter", ["ddp-launch", "environment"])
def test_ranks_of_one_host_listen_on_the_loopback_alone(
    starter: str, start_job: Callable[..., Any], mpiexec: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, numpy as np, collectives\n"
        "comm = collectives.init(timeout=40)\n"
        "comm.all_reduce(np.ones(1))\n"
        f"open(r'{tmp_path}/ready' + str(comm.rank), 'w').close()\n"
        "time.sleep(60)\n"
    )
    rank = [sys.executable, str(script)]
    if starter == "ddp-launch":
        jobs = [start_job([sys.executable, "-m", "launcher", "-n", "2", str(script)])]
    else:
        if not has_mpich():
            pytest.skip("takes MPICH")
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        shared["DDP_JOB_SECRET"] = str(tmp_path)
        jobs = [start_job(rank, env={**shared, "RANK": number, "LOCAL_RANK": number}) for number in "01"]
    wait_until(lambda: all((tmp_path / f"ready{number}").exists() for number in range(2)), 60)
    if starter == "ddp-launch":
        assert jobs[0].listening()
    # With MPICH ddp-launch starts no mpiexec; Open MPI's prterun listens everywhere.
    engine = starter == "ddp-launch" and mpi_family(mpiexec[0]) == MPICH
    assert [job.listening_outside(engine) for job in jobs] == [[]] * len(jobs)
