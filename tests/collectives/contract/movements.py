"""What every backend owes of collectives that move rows."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator
from tests.collectives.contract.run import Run


class MovementsContract:
    """broadcast, gather, all_gather, scatter, all_to_all."""

    def test_rows_that_differ_in_shape_or_dtype_are_named_on_every_rank(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            if comm.size > 1:
                with pytest.raises(collectives.MismatchError, match=r"all_gather #\d+ +- +float64 \(1, 3\)"):
                    comm.all_gather(np.ones((1, 3 if comm.rank == 1 else 2)))
                assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)

    def test_a_root_is_a_whole_number_of_any_kind(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            last = comm.size - 1
            for root in (np.int64(last), last, np.uint8(last)):  # not even the same kind on all ranks
                x = np.array([comm.rank])
                assert comm.broadcast(x, root if comm.rank else last) is x
                assert x == last
                total = comm.reduce(np.ones(1), root=root)
                assert total == comm.size if comm.rank == last else total is None
            with pytest.raises(collectives.ArgumentError, match="root should be a rank from 0"):
                comm.gather(np.ones(1), root=0.0)

        run(check)

    def test_roots_lengths_and_ops_that_do_not_exist(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            with pytest.raises(collectives.ArgumentError, match=f"root should be a rank from 0 to {comm.size - 1}"):
                comm.reduce(np.ones(1), root=comm.size)
            with pytest.raises(collectives.ArgumentError, match="root"):
                comm.broadcast(np.ones(1), root=-1)
            for op in ("average", ["sum"]):
                with pytest.raises(collectives.ArgumentError, match="op should be one of sum, mean, max, min, prod"):
                    comm.all_reduce(np.ones(1), op)
            with pytest.raises(collectives.ArgumentError, match="lengths should be"):
                comm.all_gather(np.ones(1), lengths=[1] * (comm.size + 1))
            with pytest.raises(collectives.ArgumentError, match="but x has 1 rows"):
                comm.all_gather(np.ones(1), lengths=[2] * comm.size)

        run(check)

    def test_all_to_all_of_equal_parts_is_a_transposition(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            x = np.arange(comm.size * 2.0) + 100 * comm.rank
            there = comm.all_to_all(x, lengths="equal")
            assert_array_equal(comm.all_to_all(there, lengths="equal"), x)
            empty = comm.all_to_all(np.ones((0, 3), np.int8), lengths="equal")
            assert (empty.shape, empty.dtype) == ((0, 3), np.int8)
            assert comm.all_to_all(np.ones((comm.size, 0))).shape == (comm.size, 0)
            comm.all_to_all(x, out=x)  # in place
            assert_array_equal(x, there)

        run(check)

    def test_all_to_all_checks_how_many_rows_each_rank_sends(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            ranks = range(comm.size)
            x = np.repeat(comm.rank * 10.0 + np.arange(comm.size), np.arange(comm.size) + comm.rank)
            sends = [rank + comm.rank for rank in ranks]
            for async_op in (False, True):
                received = comm.all_to_all(x, lengths=sends, out_lengths=sends, async_op=async_op)
                expected = np.repeat(np.array(ranks) * 10.0 + comm.rank, sends)
                assert_array_equal(received.wait() if async_op else received, expected)
            if comm.size > 1:  # as many rows in all, but not from these ranks
                wrong = [sends[0] + sends[1], 0, *sends[2:]]
                last = comm.rank == comm.size - 1  # the others have what they expect
                with pytest.raises(collectives.ArgumentError) if last else contextlib.nullcontext() as raised:
                    comm.all_to_all(x, lengths=sends, out_lengths=wrong if last else sends)
                assert raised is None or f"expected rows {wrong} from the ranks, and got {sends}" in str(raised.value)
            comm.barrier()

        run(check)

    def test_all_to_all_refuses_what_does_not_fit(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            size = comm.size
            with pytest.raises(collectives.ArgumentError, match="all_to_all splits axis 0, and x is 0-d"):
                comm.all_to_all(np.float32(1))
            with pytest.raises(collectives.ArgumentError, match=f"add up to {size}, x has 0 rows"):
                comm.all_to_all(np.ones((0, 2)), lengths=[1] * size)
            with pytest.raises(collectives.ArgumentError, match="lengths should be"):
                comm.all_to_all(np.ones(2), lengths=[1] * (size + 1))
            with pytest.raises(collectives.ArgumentError, match="lengths should be"):
                comm.all_to_all(np.ones(size), lengths=[[1] * size] * (size + 1))
            with pytest.raises(collectives.ArgumentError, match="lengths should be"):
                comm.all_to_all(np.ones(size), lengths="even")
            if size > 1:
                with pytest.raises(collectives.ArgumentError, match="needs a multiple"):
                    comm.all_to_all(np.ones(size + 1), lengths="equal")
            with pytest.raises(collectives.ArgumentError, match="out should be"):
                comm.all_to_all(np.ones(size), out=np.ones(size + 1))
            with pytest.raises(collectives.ArgumentError, match="out_lengths should be"):
                comm.all_to_all(np.ones(size), out_lengths=[1] * (size + 1))
            assert comm.all_reduce(np.ones(1)) == size

        run(check)
