"""One rank on each of two hosts: the contract over a wire, the same training, and an end when a rank is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

from launcher.engines.mpiexec import MPICH, mpi_family
from tests.conftest import Ended, Run

pytestmark = [pytest.mark.long, pytest.mark.mpi, pytest.mark.root, pytest.mark.timeout(200)]

HERE = Path(__file__).parent
CONTRACT = str(HERE.parent / "collectives" / "test_contract.py")
DIGITS = str(HERE.parent.parent / "examples" / "resume_digits.py")
SCRIPT = str(HERE / "hosts.sh")

WORLD = "mpi True [[0, 0, 0], [1, 0, 1]]\n"
# Slow enough that it is seen: 1 MiB takes 84 ms, and 0.4 ms in one machine's memory.
RATE = "100mbit"
BYTES_PER_S = 12.5e6


@pytest.fixture(scope="module")
def hosts(cluster: Any) -> list[str]:
    """The names of two hosts with a wire between them."""
    return cluster("hosts.sh", "up", RATE)


@pytest.fixture
def run(hosts: list[str], mpiexec: Any, run_job: Run) -> Run:
    """`run(script, ...)` runs it on two ranks, the first on the first host, the second on the second; `each=2` on two
    a host.
    """
    if mpi_family(mpiexec[0]) != MPICH:
        pytest.skip("the way to two hosts on one machine is known for MPICH alone")
    # The hosts share one kernel, and UCX must not find its ways from process to process.
    options = ["-launcher", "ssh", "-launcher-exec", SCRIPT, "-localhost", "10.0.0.1", "-hosts", ",".join(hosts)]

    def start(*args: str, timeout: float = 60, each: int = 1, **expected: Any) -> Ended:
        start = [SCRIPT, hosts[0], *mpiexec, *options, "-ppn", str(each), "-n", str(2 * each)]
        rank = ["-genv", "UCX_TLS", "tcp,self", sys.executable, *args]
        return run_job([*start, *rank], timeout, env={"OMP_NUM_THREADS": "1"}, **{"code": 0, **expected})

    return start


def test_each_rank_is_the_first_of_its_node(run: Run) -> None:
    run(str(HERE / "where.py"), out=WORLD)


def test_hosts_meet_without_an_engine(hosts: list[str], mpiexec: Any, start_job: Any) -> None:
    if mpi_family(mpiexec[0]) != MPICH:
        pytest.skip("takes MPICH")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "DDP_JOB_SECRET": "of these two"}
    command = [sys.executable, str(HERE / "where.py")]
    jobs = [start_job([SCRIPT, host, *command], env={**shared, "RANK": str(n)}) for n, host in enumerate(hosts)]
    assert [job.wait(60, code=0).stdout for job in jobs] == [WORLD, ""]


# What the busier of two ranks sends of 4 MiB: the table in docs/collectives.md for n = 2.
ON_THE_WIRE = {
    "all_reduce": 1.0,
    "reduce": 1.0,
    "reduce_scatter": 0.5,
    "broadcast": 1.0,
    "gather": 0.5,
    "all_gather": 0.5,
    "scatter": 0.5,
    "all_to_all": 0.5,
    "send": 1.0,
    "barrier": 0.0,
}


def test_no_more_takes_the_wire_than_must(run: Run) -> None:
    done = run(str(HERE / "on_the_wire.py"))
    shares = {name: max(sent) / (4 << 20) for name, sent in json.loads(done.stdout).items()}
    headers, small_messages = 1.1, 0.02
    for name, share in ON_THE_WIRE.items():
        assert share <= shares[name] <= headers * share + small_messages, (name, shares)


@pytest.mark.parametrize("each", [1, 2])
def test_the_contract_holds_between_hosts(run: Run, each: int) -> None:
    done = run("-m", "pytest", CONTRACT, "-q", "-x", "-k", "TestMPI", "-p", "no:cacheprovider", timeout=150, each=each)
    assert done.stdout.count(" passed") == 2 * each


def test_ranks_of_a_host_share_memory_and_those_of_two_do_not(run: Run) -> None:
    told = json.loads(run(str(HERE / "in_common.py"), each=2).stdout)
    assert [(rank, node) for rank, node, _ in told] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    first, second, third, fourth = (segments for _, _, segments in told)
    assert (first, third) == (second, fourth)
    assert len(first) == len(third) == 2  # the board, and the array
    assert not {*first} & {*third}


@pytest.mark.parametrize("each", [1, 2])
def test_ranks_on_two_hosts_that_call_different_things_are_told_so(run: Run, tmp_path: Path, each: int) -> None:
    script = tmp_path / "different.py"
    script.write_text(
        "import numpy as np\nimport collectives\n"
        "comm = collectives.init(timeout=20, check='always')\n"
        "for _ in range(150): comm.barrier()\n"  # past the calls that are compared in any case
        "try:\n"
        "    comm.all_reduce(np.ones(3)) if comm.rank == 0 else comm.all_gather(np.ones(4))\n"
        "except collectives.MismatchError as error:\n"
        "    told = str(error)\n"
        "assert 'all_reduce' in told and 'all_gather' in told and 'different.py:6' in told, told\n"
        "assert comm.all_reduce(np.array(1)) == comm.size\n"  # and go on
        "if comm.rank == 0: print('told')\n"
    )
    run(str(script), each=each, out="told\n")


def test_two_hosts_train_as_one_rank_does(run: Run, run_job: Run, tmp_path: Path) -> None:
    losses = []
    for start in (lambda *args: run_job([sys.executable, *args], code=0), run):
        metrics = tmp_path / str(len(losses))
        start(DIGITS, "--epochs", "1", "--dtype", "float64", "--metrics", str(metrics))
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert len(losses[0]) == 23
    assert_allclose(losses[1], losses[0], rtol=0, atol=1e-10)
