"""What every backend owes, over shared memory on one node and on several: ranks as threads, then as processes.

Processes of one machine stand on several nodes if their placements say so, and then do all that they would do there.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator, world
from collectives.backends.mpi.mpi_transport import MPITransport
from collectives.backends.mpi.mpi_world import RankInfo, rank_info_of
from collectives.backends.shm.hierarchy import HierarchicalTransport, use_shared_memory
from collectives.backends.shm.segment import ControlBlock
from collectives.backends.shm.shm_transport import ShmTransport
from collectives.engine.queue import run_to_completion
from collectives.reduction import BFLOAT16, combine_in_tree
from tests.collectives.backends.shm.ranks import run_sharing
from tests.collectives.contract.agreement import AgreementContract
from tests.collectives.contract.life import LifeContract
from tests.collectives.contract.movements import MovementsContract
from tests.collectives.contract.objects import ObjectsContract
from tests.collectives.contract.random_calls import RandomContract, make_calls
from tests.collectives.contract.reductions import ReductionsContract
from tests.collectives.contract.refusals import RefusalsContract
from tests.collectives.contract.run import Run
from tests.collectives.test_contract import Contract, by_messages

#: Each rank's node: three and one, by turns, and three nodes of which one has two ranks.
NODES = [[0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 2]]
#: Where processes stand, by their number; of three, two by turns and one alone; of two there is nothing to divide.
OF_PROCESSES = {3: [[0, 1, 0]], 4: NODES[:2], 5: [[0, 0, 1, 1, 1]]}


started = world.world_from_env()
if started is None:  # not inside a job of tests/collectives/test_contract.py

    class Shared:
        @pytest.fixture(params=[*(pytest.param(size, marks=pytest.mark.long) for size in (2, 3)), 5])
        def run(self, request: pytest.FixtureRequest) -> Run:
            return functools.partial(run_on, ShmTransport, [0] * request.param)

    # More than three ranks reduce parts of arrays, not all of them. Three are processes, in TestMPI; two are threads in
    # the tests below, and in test_inline.py.
    class TestShared(
        Shared,
        ReductionsContract,
        MovementsContract,
        ObjectsContract,
        AgreementContract,
        RandomContract,
        RefusalsContract,
    ):
        pass

    @pytest.mark.long
    class TestAllShared(Shared, Contract):
        pass

    class TestHierarchy(Contract):
        # Two nodes of several ranks are processes, in TestMPIHierarchy.
        @pytest.fixture(
            params=[*(pytest.param(nodes, marks=pytest.mark.long) for nodes in NODES[:2]), NODES[2]], ids=str
        )
        def run(self, request: pytest.FixtureRequest) -> Run:
            return functools.partial(run_on, HierarchicalTransport, request.param)


def run_on(transport: type, nodes: list[int], fn: Callable[[Communicator], Any]) -> list[Any]:
    def check(comm: Communicator) -> Any:
        assert isinstance(comm.transport, transport)
        return fn(comm)

    return run_sharing(check, nodes)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_late_between_any_two_steps(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            if random.random() < 0.1:
                time.sleep(random.random() * 3e-4)
            return method(*args)

        return act

    for name in ("publish", "all_arrived", "advance", "advanced", "next_staging"):
        monkeypatch.setattr(ControlBlock, name, late(getattr(ControlBlock, name)))
    run_sharing(lambda comm: make_calls(comm, 100, comm.size), [0] * size)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("nodes", [[0] * 3, [0] * 5, [0, 0, 1], [0, 1, 0, 1, 1]], ids=str)
def test_long_sums_in_tree_order(nodes: list[int], dtype: np.dtype[Any]) -> None:
    everyones = [np.random.default_rng(rank).normal(size=600_001).astype(dtype) for rank in range(len(nodes))]
    want = combine_in_tree([array.astype(np.float32) for array in everyones], np.add).astype(dtype).tobytes()

    def check(comm: Communicator) -> None:
        shared = comm.empty(600_001, dtype)
        shared[...] = everyones[comm.rank]
        assert comm.all_reduce(everyones[comm.rank], order="tree").tobytes() == want
        assert comm.all_gather(comm.reduce_scatter(shared, order="tree")).tobytes() == want
        assert comm.all_reduce(shared, order="tree", out=shared).tobytes() == want

    run_sharing(check, nodes)


class PlacedElsewhere:
    """A rank's membership in MPI's world, but for where the ranks stand; all calls are compared between nodes."""

    checks = None

    def __init__(self, membership: Any, nodes: Sequence[int]) -> None:
        self._membership = membership
        self._nodes = nodes

    def rank_info(self, members: Sequence[int], rank: int) -> RankInfo:
        return rank_info_of([f"node {self._nodes[member]}" for member in members], rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._membership, name)


@functools.cache
def on_nodes(nodes: tuple[int, ...]) -> Communicator:
    comm = collectives.init("mpi", timeout=20, check="always")
    twin: Any = comm.duplicate().transport
    below = getattr(twin, "_inner", twin)
    elsewhere: Any = PlacedElsewhere(below._membership, nodes)
    seated = MPITransport(below._MPI, below._comm, elsewhere, below._members, f"nodes {nodes}", below._max_count)
    return Communicator(run_to_completion("share", use_shared_memory(seated), seated, 20), 20, comm.registry)


if started is not None:

    class OnNodes:
        @pytest.fixture(params=OF_PROCESSES.get(started.size, []), ids=str)
        def run(self, request: pytest.FixtureRequest) -> Run:
            comm = on_nodes(tuple(request.param))
            assert isinstance(comm.transport, HierarchicalTransport)
            return lambda fn: [fn(comm)]

    class TestMPIHierarchy(OnNodes, LifeContract, RandomContract):
        pass

    @pytest.mark.long
    class TestMPIAllOnNodes(OnNodes, Contract):
        pass

    @pytest.mark.parametrize("nodes", [None, *OF_PROCESSES.get(started.size, [])[-1:]])
    def test_mpi_reduces_a_long_array_in_parts(nodes: list[int] | None) -> None:
        comm = by_messages(2**31 - 1) if nodes is None else on_nodes(tuple(nodes))
        x = np.arange((2 << 20) + 3, dtype=np.float32)
        got = comm.reduce(x + comm.rank, "mean", 1)
        if comm.rank == 1:
            assert_array_equal(got, x + (comm.size - 1) / 2)
