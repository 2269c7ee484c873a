"""What every backend owes of collectives that move rows."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import ArgumentError, Communicator
from tests.collectives.contract.run import on_every_rank


class MovementsContract:
    """broadcast, gather, all_gather, scatter, all_to_all."""

    @on_every_rank
    def test_a_root_is_a_whole_number_of_any_kind(self, comm: Communicator) -> None:
        last = comm.size - 1
        for root in (np.int64(last), last, np.uint8(last)):  # not even the same kind on all ranks
            x = np.array([comm.rank])
            assert comm.broadcast(x, root if comm.rank else last) is x
            assert x == last
            total = comm.reduce(np.ones(1), root=root)
            assert total == comm.size if comm.rank == last else total is None

    @on_every_rank
    def test_all_to_all_of_equal_parts_is_a_transposition(self, comm: Communicator) -> None:
        x = np.arange(comm.size * 2.0) + 100 * comm.rank
        there = comm.all_to_all(x, lengths="equal")
        assert_array_equal(comm.all_to_all(there, lengths="equal"), x)
        assert comm.all_to_all(np.ones((0, 3)), lengths="equal").shape == (0, 3)
        assert comm.all_to_all(np.ones((comm.size, 0))).shape == (comm.size, 0)
        comm.all_to_all(x, out=x)  # in place
        assert_array_equal(x, there)

    @on_every_rank
    def test_all_to_all_checks_how_many_rows_each_rank_sends(self, comm: Communicator) -> None:
        sends = [rank + comm.rank for rank in range(comm.size)]
        x = np.repeat(comm.rank * 10 + np.arange(comm.size), sends)
        for async_op in (False, True):
            received = comm.all_to_all(x, lengths=sends, out_lengths=sends, async_op=async_op)
            expected = np.repeat(np.arange(comm.size) * 10 + comm.rank, sends)
            assert_array_equal(received.wait() if async_op else received, expected)
        if comm.rank < comm.size - 1:  # who has what it expects
            comm.all_to_all(x, lengths=sends, out_lengths=sends)
        elif comm.size > 1:  # as many rows in all, but not from these ranks
            wrong = [sends[0] + sends[1], 0, *sends[2:]]
            words = f"expected rows {wrong} from the ranks, and got {sends}"
            with pytest.raises(ArgumentError, match=re.escape(words)):
                comm.all_to_all(x, lengths=sends, out_lengths=wrong)
        comm.barrier()
