"""Ranks on several nodes: who speaks to whom, the same bits everywhere, and what a node alone finds out."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from collectives import CollectivesError, Communicator
from collectives.backends.shm.hierarchy import HierarchicalTransport
from collectives.backends.shm.segment import TILE_BYTES, inline_bytes, staging_bytes
from tests.collectives.backends.shm.ranks import run_sharing

NODES = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1, 2], [0, 1, 1, 2]]
on_all_nodes = pytest.mark.parametrize(
    "nodes", [*NODES[1:4], *(pytest.param(nodes, marks=pytest.mark.long) for nodes in (NODES[0], NODES[4]))], ids=str
)
# float32: nothing, a slot to the last byte and beyond, a tile to the last byte and beyond, and many
LENGTHS = [
    0,
    1,
    inline_bytes(2) // 4,
    inline_bytes(2) // 4 + 1,
    staging_bytes(2) // 4,
    staging_bytes(2) // 4 + 1,
    staging_bytes(2) // 2 + 3,
]


close = functools.partial(assert_allclose, rtol=1e-4, atol=1e-5)


# Equal nodes by turns; a node of one rank, the others apart.
@pytest.mark.parametrize("nodes", [pytest.param(NODES[2], marks=pytest.mark.long), NODES[3]], ids=str)
def test_totals_are_right_and_the_same_bits_on_every_rank(nodes: list[int]) -> None:
    def check(comm: Communicator) -> list[bytes]:
        bits = []
        for length in LENGTHS:
            everyones = np.random.default_rng(length).normal(size=(comm.size, length)).astype(np.float32)
            x = everyones[comm.rank]
            want = everyones.sum(0, dtype=np.float64)
            total = comm.all_reduce(x)
            close(total, want)
            bits.append(total.tobytes())
            close(comm.all_reduce(x.copy(), "mean", out=np.empty_like(x)), want / comm.size)
            close(comm.reduce_scatter(x, scale=2.0), np.array_split(2 * want, comm.size)[comm.rank])
            for root in (0, comm.size - 1):
                on_root = comm.reduce(x, root=root, scale=2.0)
                assert (on_root is None) == (comm.rank != root)
                if on_root is not None:
                    close(on_root, 2 * want)
                assert_array_equal(comm.broadcast(x.copy(), root), everyones[root])
        return bits

    first, *others = run_sharing(check, nodes)
    assert all(bits == first for bits in others)


@on_all_nodes
def test_arrays_of_comm_empty_are_shared_within_each_node(nodes: list[int]) -> None:
    def check(comm: Communicator) -> None:
        twin = comm.duplicate()
        x = comm.empty(TILE_BYTES)
        arrays = comm.transport.shared_arrays
        assert (arrays is None) == (nodes.count(nodes[comm.rank]) == 1)
        if arrays is not None:
            assert arrays.find(x).segment != 0
        ranks = sum(range(comm.size))
        for each in (comm, twin):  # a duplicate knows the arrays of its communicator
            x[:] = np.arange(TILE_BYTES) % 1000 + comm.rank
            assert each.all_reduce(x, out=x) is x
            assert_array_equal(x, np.arange(TILE_BYTES) % 1000 * comm.size + ranks)
            x[:] = comm.rank
            for root in range(comm.size):
                got = each.reduce(x, root=root)
                assert got is None or (got == ranks).all()
            assert (each.broadcast(x, root=2) == 2).all()

    run_sharing(check, nodes)


@on_all_nodes
def test_splits_of_ranks_on_nodes_find_their_own_nodes(nodes: list[int]) -> None:
    def check(comm: Communicator) -> None:
        for color, key in ((comm.rank % 2, None), (nodes[comm.rank], None), (0, -comm.rank), (comm.rank // 3, 0)):
            part = comm.split(color, key)
            assert part is not None
            ranks = part.all_gather_object(comm.rank)
            stand = [nodes[rank] for rank in ranks]
            assert part.local_size == stand.count(nodes[comm.rank])
            several = 1 < len(set(stand)) < len(stand)
            assert isinstance(part.transport, HierarchicalTransport) == several
            for each in (part, part.duplicate()):
                assert (each.all_reduce(np.full(TILE_BYTES, float(comm.rank))) == sum(ranks)).all()

    run_sharing(check, nodes)


def test_what_only_a_node_finds_out_is_told_there_and_the_communicator_is_of_no_use_any_more() -> None:
    def check(comm: Communicator) -> str:
        below: Any = comm.transport._inner  # type: ignore[attr-defined]  # a hierarchy has one
        below.exchange_signatures = lambda signature: lambda: True  # as after the calls that are compared between nodes
        below.signatures = lambda: None
        comm.barrier()
        assert_array_equal(comm.all_gather(np.arange(comm.rank)), [0, 0, 1, 0, 1, 2])
        comm.timeout = 0.5
        with pytest.raises(CollectivesError) as caught:
            comm.all_reduce(np.ones(3 if comm.rank == 2 else 2))
        with pytest.raises(type(caught.value)) as copy_error:
            comm.barrier()
        assert str(copy_error.value) == str(caught.value)
        return f"{type(caught.value).__name__}: {caught.value}"

    told = run_sharing(check, [0, 1, 1, 0])
    for rank in (1, 2):
        assert told[rank].startswith(f"MismatchError: rank {rank}: the ranks made different calls")
        assert re.search(r"float64 \(2,\).*float64 \(3,\)", told[rank], re.DOTALL)
    for rank in (0, 3):
        assert told[rank].startswith("CollectiveTimeout")
