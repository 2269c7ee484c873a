"""The communicator of the collectives that autograd sees: one for each that they are called with, closed with it."""

from __future__ import annotations

import gc
import threading

import pytest

import ddp
from collectives import Communicator, CommunicatorClosed
from ddp import parallel
from ddp.parallel import collectives as differentiable
from tests.ddp.parallel.ranks import on_ranks


def weights() -> ddp.Tensor:
    return ddp.ones(4, 2, dtype=ddp.float64, requires_grad=True)


def test_closing_a_communicator_closes_its_twin_and_leaves_nothing() -> None:
    before = threading.active_count()

    def rank(comm: Communicator) -> None:
        for order in range(3):
            other = comm.duplicate()
            parallel.all_reduce(ddp.ones(1), comm=other)
            twin = differentiable.private_duplicate(other)
            y = parallel.all_gather(weights(), other)
            if order == comm.rank:  # at any time, whatever the others do
                comm.barrier()
            other.close()
            other.close()
            if order != comm.rank:
                comm.barrier()
            with pytest.raises(CommunicatorClosed):
                parallel.all_reduce(ddp.ones(1), comm=other)
            with pytest.raises(CommunicatorClosed):
                y.sum().backward()
            with pytest.raises(CommunicatorClosed):
                twin.barrier()
            fresh = comm.duplicate()
            fresh.close()
            with pytest.raises(CommunicatorClosed):
                parallel.all_reduce(ddp.ones(1), comm=fresh)

    on_ranks(rank, 3)
    gc.collect()
    assert len(differentiable._duplicates) <= 1  # the world's, which lives as long as this process
    assert threading.active_count() <= before
