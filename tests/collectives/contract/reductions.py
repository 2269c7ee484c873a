"""What every backend owes of reductions, and of what all collectives do with their arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import CollectivesError, Communicator, MismatchError, ReduceOp
from collectives.reduction import BFLOAT16, COMBINE, combine_in_tree, divide_and_scale, wire_dtype, wire_op
from tests.collectives.contract.run import assert_usable, on_every_rank

HALVES = [np.dtype(np.float16), BFLOAT16]


class ReductionsContract:
    """all_reduce, reduce, reduce_scatter."""

    @on_every_rank
    def test_out_may_overlap_the_input(self, comm: Communicator) -> None:
        base = np.arange(10.0)
        comm.all_reduce(base[:8], out=base[2:])
        assert_array_equal(base[2:], comm.size * np.arange(8))

    @pytest.mark.parametrize("dtype", ["i8", "i2", ">f8", "f2", ">c8"])
    @on_every_rank
    def test_out_without_dimensions(self, comm: Communicator, dtype: str) -> None:
        x = np.array(1, dtype)
        out = np.zeros((), dtype)
        for op, expected in (("sum", comm.size), ("mean", 1), ("prod", 1)):
            for _ in range(2):  # the second call reuses the plan of the first
                assert comm.all_reduce(x, op, out=out) is out
                assert_array_equal(out, expected)

    @on_every_rank
    def test_scale_is_a_number_or_known_later(self, comm: Communicator) -> None:
        assert_array_equal(comm.all_reduce(np.full(2, 3.0), scale=0.5), np.full(2, 1.5 * comm.size))
        weights = np.array([float(comm.rank + 1)])
        first = comm.all_reduce(weights, out=weights, async_op=True)
        second = comm.all_reduce(np.ones(2), scale=lambda: 1 / weights[0], async_op=True)
        assert first.wait() is weights
        assert_array_equal(second.wait(), np.full(2, comm.size * (1 / sum(range(comm.size + 1)))))

    @on_every_rank
    def test_a_scale_that_differs_is_named_on_every_rank(self, comm: Communicator) -> None:
        x = np.ones((comm.size, 2))
        mine = comm.rank + 1.0
        for name in ("all_reduce", "reduce", "reduce_scatter"):
            call = getattr(comm, name)
            for scale in (mine, 0.5, mine, 0.0 if comm.rank else None, -mine):
                if comm.size == 1 or scale == 0.5:
                    call(x, scale=scale)
                    continue
                with pytest.raises(MismatchError, match=rf"{name} #\d+ +sum.* scale {scale or 0.0!r} "):
                    call(x, scale=scale)
        for scales, factor in (((2, np.float32(2.0), 2.0), 2.0), ((1.0, None, 1), 1.0)):
            assert_array_equal(comm.all_reduce(x, scale=scales[comm.rank % 3]), factor * comm.size * x)

    @on_every_rank
    def test_a_function_gives_the_same_scale_on_every_rank_or_each_raises(self, comm: Communicator) -> None:
        mine = comm.rank + 1.0
        x = np.ones((comm.size, 2))

        def fail() -> float:
            if comm.rank == comm.size - 1:
                raise ZeroDivisionError("no samples")
            return 1.0

        for scale in (lambda: 0.5, 0.5 if comm.rank else lambda: 0.5):
            assert_array_equal(comm.all_reduce(x, scale=scale), x * comm.size / 2)
        for name in ("all_reduce", "reduce", "reduce_scatter") if comm.size > 1 else ():
            call = getattr(comm, name)
            for scale in (lambda: mine, (lambda: mine) if comm.rank else mine):
                with pytest.raises(MismatchError, match=rf"{name} #\d+ +sum.* scale {mine!r} "):
                    call(x, scale=scale, async_op=True).wait()
            with pytest.raises(MismatchError, match=r"sum.* with a scale that failed") as raised:
                call(x, scale=fail)
            expected = ZeroDivisionError if comm.rank == comm.size - 1 else type(None)
            assert isinstance(raised.value.__cause__, expected)
        assert_usable(comm)

    @on_every_rank
    def test_a_function_that_gives_no_scale_on_any_rank_breaks_the_communicator(self, comm: Communicator) -> None:
        def mismatch() -> float:
            raise MismatchError("other calls")

        for fail, said in (
            (lambda: "2", "scale should be a real number"),
            (lambda: None, "it returned no number"),
            (mismatch, "other calls"),
        ):
            twin = comm.duplicate()
            for _ in range(2):
                with pytest.raises(CollectivesError, match=f"the function given as scale failed: {said}"):
                    twin.all_reduce(np.ones(2), scale=fail)
            twin.close()

    @on_every_rank
    def test_the_same_inputs_give_the_same_bits(self, comm: Communicator) -> None:
        x = np.random.default_rng(comm.rank).normal(size=1001).astype(np.float32)
        results = {comm.all_reduce(x).tobytes() for _ in range(2)}
        assert len(results) == 1
        assert set(comm.all_gather_object(results.pop())) == {comm.all_reduce(x).tobytes()}

    @pytest.mark.parametrize("dtype", [*HALVES, np.dtype("f"), np.dtype("d"), np.dtype("F"), np.dtype("i2")], ids=str)
    @on_every_rank
    def test_in_tree_order_the_bits_are_known(self, comm: Communicator, dtype: np.dtype[Any]) -> None:
        for op, shape in itertools.product(("sum", "mean", "prod"), ((7, 3), (0, 2))):
            everyones = [np.random.default_rng(rank).normal(size=shape).astype(dtype) for rank in range(comm.size)]
            x = everyones[comm.rank]
            wire = wire_dtype(dtype, ReduceOp(op))
            total = combine_in_tree([each.astype(wire) for each in everyones], COMBINE[wire_op(ReduceOp(op))])
            divide_and_scale(total, ReduceOp(op), comm.size, None)
            want = total.astype(dtype)
            part = np.array_split(want, comm.size)[comm.rank]
            assert comm.all_reduce(x, op, order="tree").tobytes() == want.tobytes()
            assert comm.reduce_scatter(x, op, order="tree").tobytes() == part.tobytes()
            work = comm.all_reduce(x, op, order="tree", out=x, async_op=True)
            assert work.wait().tobytes() == want.tobytes()
        zero = np.ones((), dtype)
        assert comm.all_reduce(zero, "mean", order="tree") == 1
        if comm.size > 1:
            with pytest.raises(MismatchError, match="in tree order"):
                comm.all_reduce(zero, order="tree" if comm.rank else None)

    @on_every_rank
    def test_a_result_of_reduce_scatter_may_lie_in_the_input(self, comm: Communicator) -> None:
        rows = np.arange(4.0 * comm.size).reshape(comm.size, 4)
        comm.reduce_scatter(rows, out=rows[:1])
        assert_array_equal(rows[0], comm.size * np.arange(4.0) + 4 * comm.size * comm.rank)
        y = comm.reduce_scatter(np.ones((2 * comm.size, 6))[::2, ::-3])
        assert y.flags.c_contiguous
        assert_array_equal(y, np.full((1, 2), comm.size))

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @on_every_rank
    def test_halves_are_summed_in_float32_and_rounded_once(self, comm: Communicator, dtype: np.dtype[Any]) -> None:
        # In the dtype itself, large + 1 is large again.
        large = 2.0 ** (np.finfo(np.float16).nmant + 1) if dtype == np.float16 else 2.0**8
        x = np.full((2, 3), large if comm.rank == 0 else 1.0).astype(dtype)
        total = np.full((2, 3), np.float32(large + comm.size - 1))
        assert_array_equal(comm.all_reduce(x), total.astype(dtype))
        assert_array_equal(comm.all_reduce(x, "mean", scale=3.0), (total / comm.size * 3).astype(dtype))
        for out in (x.copy(), np.zeros((2, 6), dtype)[:, ::2]):
            assert comm.all_reduce(x, out=out) is out
            assert_array_equal(out, total.astype(dtype))

    @pytest.mark.filterwarnings("ignore:invalid value")
    @pytest.mark.parametrize("dtype", [*HALVES, np.dtype("f"), np.dtype("d"), np.dtype("g")], ids=str)
    @on_every_rank
    def test_nan_on_one_rank_is_the_max_and_the_min_of_all(self, comm: Communicator, dtype: np.dtype[Any]) -> None:
        for lost in range(comm.size):
            x = np.array([np.nan if comm.rank == lost else 1, comm.rank, -np.inf]).astype(dtype)
            for op, other in (("max", comm.size - 1), ("min", 0)):
                expected = np.array([np.nan, other, -np.inf]).astype(dtype)
                assert_array_equal(comm.all_reduce(x, op).astype(np.float64), expected.astype(np.float64))
