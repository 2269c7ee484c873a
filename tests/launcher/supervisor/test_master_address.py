"""Where ranks meet rank 0, for libraries that ask the environment: an address, and a port that was just free."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.world import AGENT
from launcher.engines.mpich import MpichEngine
from launcher.job import Job
from launcher.network import Host
from launcher.supervisor.environment import host_of_rank_0, master_address
from tests.conftest import SLURM

SHOW = 'print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])\n'


def job(**settings: object) -> Job:
    return Job(module="train", **settings)  # type: ignore[arg-type]


def test_a_users_own_values_stay_and_those_of_a_job_around_this_one_do_not() -> None:
    assert master_address({"MASTER_PORT": "8"}, "a", 7) == {"MASTER_ADDR": "a"}
    theirs = {"MASTER_ADDR": "b", "MASTER_PORT": "8", AGENT: "1"}
    assert master_address(theirs, "a", 7) == {"MASTER_ADDR": "a", "MASTER_PORT": "7"}


@pytest.mark.parametrize(
    ("hosts", "remote_hosts", "environ", "host"),
    [
        ((), (), {}, "127.0.0.1"),
        ((Host("localhost", 2),), (), {}, "127.0.0.1"),
        ((Host("b", 2), Host("localhost", 2)), ("b",), {}, "b"),
        ((), ("n1", "n3"), {"SLURM_JOB_NODELIST": "n[1-3]", "PATH": str(SLURM)}, "n1"),
    ],
)
def test_the_host_of_rank_0(
    hosts: tuple[Host, ...], remote_hosts: tuple[str, ...], environ: dict[str, str], host: str
) -> None:
    assert host_of_rank_0(job(hosts=hosts), MpichEngine("mpiexec", 2, hosts, remote_hosts), environ) == host


@pytest.mark.mpi
def test_ranks_agree_and_every_start_has_another_port(launch: Any, script: Any) -> None:
    path = script(SHOW + "sys.exit(os.environ['DDP_ATTEMPT'] != '1')")
    places = [line[3:].split() for line in launch("-n", 2, "--max-restarts", 1, path).lines]
    assert {host for host, _ in places} == {"127.0.0.1"}
    assert len({port for _, port in places}) > 1
