"""Ranks on several nodes: who speaks to whom, the same bits everywhere, and what a node alone finds out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import collectives
from collectives import Communicator
from collectives.backends.shm.hierarchy import HierarchicalTransport
from collectives.backends.shm.segment import TILE_BYTES, inline_bytes, staging_bytes
from tests.collectives.backends.shm.ranks import run_sharing

NODES = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1, 2], [0, 1, 1, 2]]
on_all_nodes = pytest.mark.parametrize("nodes", NODES, ids=str)
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


@pytest.mark.parametrize("nodes", NODES[2:4], ids=str)  # equal nodes by turns; a node of one rank, the others apart
def test_totals_are_right_and_the_same_bits_on_every_rank_and_in_every_run(nodes: list[int]) -> None:
    def check(comm: Communicator) -> list[bytes]:
        bits = []
        for length in LENGTHS:
            everyones = np.random.default_rng(length).normal(size=(comm.size, length)).astype(np.float32)
            x = everyones[comm.rank]
            want = everyones.sum(0, dtype=np.float64)
            total = comm.all_reduce(x)
            assert_allclose(total, want, rtol=1e-4, atol=1e-5)
            bits.append(total.tobytes())
            assert_array_equal(comm.all_reduce(x.copy(), "mean", out=np.empty_like(x)), total / np.float32(comm.size))
            mine = x.copy()
            assert_array_equal(comm.all_reduce(mine, out=mine, scale=0.5), total / 2)
            rows = comm.reduce_scatter(x, scale=2.0)
            assert_allclose(rows, np.array_split(2 * want, comm.size)[comm.rank], rtol=1e-4, atol=1e-5)
            for root in range(comm.size):
                on_root = comm.reduce(x, root=root, scale=2.0)
                assert (on_root is None) == (comm.rank != root)
                if on_root is not None:
                    assert_allclose(on_root, 2 * want, rtol=1e-4, atol=1e-5)
                assert_array_equal(comm.broadcast(x.copy(), root), everyones[root])
        return bits

    first, second = run_sharing(check, nodes), run_sharing(check, nodes)
    assert all(bits == first[0] for bits in first + second)


@on_all_nodes
def test_arrays_of_comm_empty_are_shared_within_each_node(nodes: list[int]) -> None:
    def check(comm: Communicator) -> None:
        twin = comm.duplicate()
        x = comm.empty(TILE_BYTES)
        arrays = comm.transport.shared_arrays
        assert (arrays is None) == (nodes.count(nodes[comm.rank]) == 1)
        if arrays is not None:
            assert arrays.find(x).segment != 0
        for each in (comm, twin):  # a duplicate knows the arrays of its communicator
            x[:] = np.arange(TILE_BYTES) % 1000 + comm.rank
            assert each.all_reduce(x, out=x) is x
            assert_array_equal(x, np.arange(TILE_BYTES) % 1000 * comm.size + sum(range(comm.size)))
            x[:] = comm.rank
            for root in range(comm.size):
                got = each.reduce(x, root=root)
                assert got is None or (got == sum(range(comm.size))).all()
            assert_array_equal(each.broadcast(x, root=2), np.full(TILE_BYTES, 2))

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
            x = np.full(TILE_BYTES, float(comm.rank))
            assert (part.all_reduce(x) == sum(ranks)).all()
            assert (part.duplicate().all_reduce(x) == sum(ranks)).all()

    run_sharing(check, nodes)


def test_every_rank_is_told_while_calls_are_compared_between_nodes() -> None:
    def check(comm: Communicator) -> str:
        with pytest.raises(collectives.MismatchError) as caught:
            comm.barrier() if comm.rank == 3 else comm.all_reduce(np.ones(2))
        assert_array_equal(comm.all_reduce(np.ones(2)), np.full(2, comm.size))  # and they go on
        return str(caught.value)

    for told in run_sharing(check, [0, 1, 0, 1]):
        assert "0-2" in told
        assert "barrier #0" in told
        assert "test_hierarchy.py" in told


def test_what_only_a_node_finds_out_is_told_there_and_the_communicator_is_of_no_use_any_more() -> None:
    def check(comm: Communicator) -> str:
        below: Any = comm.transport._inner  # type: ignore[attr-defined]  # a hierarchy has one
        below.exchange_signatures = lambda signature: lambda: True  # as after the calls that are compared between nodes
        below.signatures = lambda: None
        comm.barrier()
        assert_array_equal(comm.all_gather(np.arange(comm.rank)), [0, 0, 1, 0, 1, 2])
        comm.timeout = 0.5
        with pytest.raises(collectives.CollectivesError) as caught:
            comm.all_reduce(np.ones(3 if comm.rank == 2 else 2))
        with pytest.raises(type(caught.value)) as copy_error:
            comm.barrier()
        assert str(copy_error.value) == str(caught.value)
        return f"{type(caught.value).__name__}: {caught.value}"

    told = run_sharing(check, [0, 1, 1, 0])
    for rank in (1, 2):
        assert told[rank].startswith(f"MismatchError: rank {rank}: the ranks made different calls")
        assert "float64 (2,)" in told[rank]
        assert "float64 (3,)" in told[rank]
    for rank in (0, 3):
        assert told[rank].startswith("CollectiveTimeout")
