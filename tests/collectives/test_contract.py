"""What every backend owes: one contract, run on each backend. No test of it knows how many ranks there are.

It is run as a whole on threads, on processes that share memory, and on threads that stand on several nodes. On every
other backend a sample is run, of what that backend does by itself; and with --long the whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, run_threads, world
from collectives.errors import TooManyCommunicators
from collectives.time_limit import Deadline
from tests.collectives.contract.agreement import AgreementContract
from tests.collectives.contract.life import LifeContract
from tests.collectives.contract.movements import MovementsContract
from tests.collectives.contract.objects import ObjectsContract
from tests.collectives.contract.pairs import PairsContract
from tests.collectives.contract.random_calls import RandomContract
from tests.collectives.contract.reductions import ReductionsContract
from tests.collectives.contract.refusals import RefusalsContract
from tests.collectives.contract.run import Run


class Contract(
    ReductionsContract,
    MovementsContract,
    PairsContract,
    ObjectsContract,
    AgreementContract,
    LifeContract,
    RandomContract,
    RefusalsContract,
):
    """A backend's tests inherit this and provide `run`, which calls a function on every rank."""


# Inside the job that the last test starts, each rank collects what it runs there.
if world.world_from_env() is None:

    class TestSingle(Contract):
        @pytest.fixture
        def run(self) -> Run:
            from collectives.backends.single import SingleTransport

            return lambda fn: [fn(Communicator(SingleTransport(), timeout=20))]

    class TestThreads(Contract):
        @pytest.fixture(params=[3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2, 4))])
        def run(self, request: pytest.FixtureRequest) -> Run:
            return functools.partial(run_threads, size=request.param, timeout=20)

else:

    class Processes:
        @pytest.fixture
        def run(self) -> Run:
            comm = collectives.init("mpi", timeout=20, check="always")
            return lambda fn: [fn(comm)]

    # Communicators and messages are made by MPI. What else ranks of one node do is shared memory's: threads, in
    # TestShared, prove it as well.
    class TestMPI(Processes, LifeContract, PairsContract, RandomContract):
        pass

    @pytest.mark.long
    class TestMPIAll(Processes, Contract):
        def test_where_there_is_no_room_every_rank_says_so_and_can_go_on(self, run: Run) -> None:
            from mpi4py import MPI

            def check(comm: Communicator) -> None:
                if "MPICH" not in MPI.Get_library_version():
                    pytest.skip("other MPIs have room for too many to fill it")
                comm.registry.drain(Deadline(20))  # what other tests have closed is given back
                taken = list(_fill(MPI.COMM_SELF, MPI.Exception)) if comm.rank == 0 else []
                color = None if comm.rank == 1 else 0  # a rank in none raises as well
                said = r"cannot make another .*: close .*\(comm\.close\(\)\)"
                for make in (comm.duplicate, lambda: comm.split(comm.rank), lambda: comm.split(color)):
                    with pytest.raises(TooManyCommunicators, match=said):
                        make()
                for each in taken:
                    each.Free()
                twin = comm.duplicate()
                assert twin.all_reduce(np.ones(1)) == comm.size
                twin.close()

            run(check)

    class ByMessages:
        """MPI itself, as between nodes: what ranks of one node do in shared memory goes through it here."""

        @pytest.fixture
        def run(self) -> Run:
            comm = by_messages(limit=2**31 - 1)
            return lambda fn: [fn(comm)]

    # Random calls are made in pieces below, and between nodes in TestMPIHierarchy.
    class TestMPIMessages(ByMessages, PairsContract):
        test_another_collective = AgreementContract.test_another_collective_is_an_error_on_every_rank

    @pytest.mark.long
    class TestMPIAllByMessages(ByMessages, Contract):
        pass

    class TestMPIMessagesInPieces(ReductionsContract, MovementsContract):
        """The way of long messages in an MPI that counts in C's int, as if an int ended at 16. Others: random calls."""

        @pytest.fixture
        def run(self) -> Run:
            comm = by_messages(limit=16)
            return lambda fn: [fn(comm)]

    class TestMPIRandomCallsInPieces(RandomContract):
        @pytest.fixture
        def run(self) -> Run:
            comm = by_messages(limit=4096)
            return lambda fn: [fn(comm)]


def _fill(comm: Any, full: type[Exception]) -> Iterator[Any]:
    """As many MPI communicators as there is room for in this process."""
    with contextlib.suppress(full):
        while True:
            yield comm.Dup()


@functools.cache
def by_messages(limit: int) -> Communicator:
    from collectives.backends.mpi.mpi_transport import MPITransport

    comm = collectives.init("mpi", timeout=20, check="always")
    twin: Any = comm.duplicate().transport
    below = getattr(twin, "_inner", twin)
    messages = MPITransport(below._MPI, below._comm, below._membership, below._members, f"limit {limit}", limit)
    return Communicator(messages, 20, comm.registry)


@pytest.mark.mpi
@pytest.mark.timeout(620)  # with full counts, four ranks on two cores take minutes
@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)  # Open MPI differs from 4 on
def test_the_contract_holds_over_mpi(hold_over_mpi: Callable[..., None], size: int) -> None:
    on_nodes = [Path(__file__).parent / "backends/shm/test_contract_on_nodes.py"] if size > 1 else []
    hold_over_mpi([__file__, *on_nodes], "TestMPI or in_parts", size, timeout=600)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("size", [2, 5])
def test_sums_in_tree_order_over_mpi(hold_over_mpi: Callable[..., None], size: int) -> None:
    on_nodes = Path(__file__).parent / "backends/shm/test_contract_on_nodes.py"
    hold_over_mpi([__file__, on_nodes], "TestMPI and in_tree_order", size)
