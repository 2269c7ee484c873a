"""What every backend owes of collectives that move rows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator
from tests.collectives.contract.run import Run


class MovementsContract:
    """broadcast, gather, all_gather, scatter, all_to_all."""

    def test_broadcast_fills_x_off_the_root(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for root in range(comm.size):
                for dtype in (np.float64, np.bool_, np.int16):
                    x = np.full((2, 3), comm.rank == root).astype(dtype)
                    strided = np.full((4, 3), comm.rank == root).astype(dtype)[::2]
                    assert comm.broadcast(x, root) is x
                    assert comm.broadcast(strided, root) is strided
                    assert_array_equal(x, np.ones((2, 3), dtype))
                    assert_array_equal(strided, np.ones((2, 3), dtype))

        run(check)

    def test_gather_and_all_gather_join_uneven_parts(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            lengths = [rank % 3 for rank in range(comm.size)]
            mine = np.full((lengths[comm.rank], 2), comm.rank, np.int32)
            expected = np.concatenate([np.full((n, 2), rank) for rank, n in enumerate(lengths)])
            assert_array_equal(comm.all_gather(mine), expected)
            assert_array_equal(comm.all_gather(mine, lengths=lengths), expected)
            for root in (0, comm.size - 1):
                for known in (None, lengths):
                    whole = comm.gather(mine, root, lengths=known)
                    if comm.rank == root:
                        assert whole.dtype == np.int32
                        assert_array_equal(whole, expected)
                    else:
                        assert whole is None

        run(check)

    def test_rows_that_differ_in_shape_or_dtype_are_named_on_every_rank(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            if comm.size > 1:
                with pytest.raises(collectives.MismatchError, match=r"all_gather #\d+ +- +float64 \(1, 3\)"):
                    comm.all_gather(np.ones((1, 3 if comm.rank == 1 else 2)))
                assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)

    def test_scatter_by_lengths_and_into_out(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            lengths = [rank + 1 for rank in range(comm.size)]
            whole = np.repeat(np.arange(comm.size), lengths).astype(float)
            out = np.empty(comm.rank + 1)
            assert comm.scatter(whole, lengths=lengths, out=out) is out
            assert_array_equal(out, np.full(comm.rank + 1, comm.rank))
            if comm.rank == 0:
                with pytest.raises(collectives.ArgumentError, match="add up to"):
                    comm.scatter(whole, lengths=[0] * comm.size)

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

    def test_all_to_all_by_lengths_and_by_the_whole_table(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            table = [[(source + 2 * target) % 3 for target in range(comm.size)] for source in range(comm.size)]
            mine = table[comm.rank]
            x = np.repeat(np.arange(comm.size), mine) + 10.0 * comm.rank
            came = [table[source][comm.rank] for source in range(comm.size)]
            expected = np.repeat(10.0 * np.arange(comm.size) + comm.rank, came)
            out = np.empty(sum(came))
            strided = np.empty(2 * sum(came))[::2]
            frozen = x.copy()
            frozen.flags.writeable = False
            for lengths in (mine, table, np.array(table)):
                assert_array_equal(comm.all_to_all(frozen, lengths=lengths), expected)
                for room in (out, strided):
                    assert comm.all_to_all(x, lengths=lengths, out=room) is room
                    assert_array_equal(room, expected)

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
            assert comm.all_reduce(np.ones(1)) == size

        run(check)
