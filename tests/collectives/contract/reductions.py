"""What every backend owes of reductions, and of what all collectives do with their arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator, ReduceOp
from collectives.reduction import BFLOAT16, COMBINE, combine_in_tree, divide_and_scale, wire_dtype, wire_op
from tests.collectives.contract.run import Run

HALVES = [np.dtype(np.float16), BFLOAT16]


class ReductionsContract:
    """all_reduce, reduce, reduce_scatter."""

    def test_complex_has_no_order_and_objects_cannot_be_reduced(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            assert comm.all_reduce(np.array([1j]), "mean").tolist() == [1j]
            with pytest.raises(collectives.DtypeError, match="max of complex128"):
                comm.all_reduce(np.array([1j]), "max")
            with pytest.raises(collectives.DtypeError, match="dtype is object"):
                comm.all_reduce(np.array([object()]))
            with pytest.raises(collectives.DtypeError, match="x should be an array, is str"):
                comm.all_reduce("x")

        run(check)

    def test_out_may_overlap_the_input(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            base = np.arange(10.0)
            comm.all_reduce(base[:8], out=base[2:])
            assert_array_equal(base[2:], comm.size * np.arange(8))

        run(check)

    @pytest.mark.parametrize("dtype", ["i8", "i2", ">f8", "f2", ">c8"])
    def test_out_without_dimensions(self, run: Run, dtype: str) -> None:
        def check(comm: Communicator) -> None:
            x = np.array(1, dtype)
            out = np.zeros((), dtype)
            for op, expected in (("sum", comm.size), ("mean", 1), ("prod", 1)):
                for _ in range(2):  # the second call reuses the plan of the first
                    assert comm.all_reduce(x, op, out=out) is out
                    assert_array_equal(out, expected)

        run(check)

    def test_out_that_does_not_fit_is_refused(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            with pytest.raises(collectives.ArgumentError, match=r"out should be float64 \(3,\), is float64 \(4,\)"):
                comm.all_reduce(np.ones(3), out=np.ones(4))
            with pytest.raises(collectives.ArgumentError, match="float32"):
                comm.all_reduce(np.ones(3), out=np.ones(3, np.float32))
            frozen = np.ones(3)
            frozen.flags.writeable = False
            with pytest.raises(collectives.ArgumentError, match="read-only"):
                comm.all_reduce(frozen, out=frozen)
            # What is found out only after an exchange leaves the order of calls intact.
            with pytest.raises(collectives.ArgumentError, match="out should be"):
                comm.all_gather(np.ones((1, 2)), out=np.ones((comm.size, 3)))
            assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)

    def test_scale_is_a_number_or_known_later(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            assert_array_equal(comm.all_reduce(np.full(2, 3.0), scale=0.5), np.full(2, 1.5 * comm.size))
            weights = np.array([float(comm.rank + 1)])
            first = comm.all_reduce(weights, out=weights, async_op=True)
            second = comm.all_reduce(np.ones(2), scale=lambda: 1 / weights[0], async_op=True)
            assert first.wait() is weights
            assert_array_equal(second.wait(), np.full(2, comm.size * (1 / sum(range(comm.size + 1)))))
            with pytest.raises(collectives.DtypeError, match="scale needs a floating"):
                comm.all_reduce(np.ones(2, int), scale=0.5)

        run(check)

    def test_a_scale_that_differs_is_named_on_every_rank(self, run: Run) -> None:
        def call(comm: Communicator, name: str, scale: Any) -> Any:
            return getattr(comm, name)(np.ones((comm.size, 2)), scale=scale)

        def check(comm: Communicator) -> None:
            mine = comm.rank + 1.0
            for name in ("all_reduce", "reduce", "reduce_scatter"):
                for scale in (mine, 0.5, mine, 0.0 if comm.rank else None, -mine):
                    if comm.size == 1 or scale == 0.5:
                        call(comm, name, scale)
                        continue
                    with pytest.raises(collectives.MismatchError, match=rf"{name} #\d+ +sum.* scale {scale or 0.0!r} "):
                        call(comm, name, scale)
                same = (2, np.float32(2.0), 2.0)[comm.rank % 3]
                assert_array_equal(
                    comm.broadcast(call(comm, "all_reduce", same)), np.full((comm.size, 2), 2.0 * comm.size)
                )
                assert_array_equal(
                    call(comm, "all_reduce", (1.0, None)[comm.rank % 2]), np.full((comm.size, 2), comm.size)
                )

        run(check)

    def test_a_function_gives_the_same_scale_on_every_rank_or_each_raises(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            mine = comm.rank + 1.0
            x = np.ones((comm.size, 2))

            def fail() -> float:
                if comm.rank == comm.size - 1:
                    raise ZeroDivisionError("no samples")
                return 1.0

            for name in ("all_reduce", "reduce", "reduce_scatter"):
                call = getattr(comm, name)
                assert_array_equal(comm.broadcast(np.array(comm.all_reduce(x, scale=lambda: 0.5))), x * comm.size / 2)
                assert_array_equal(comm.all_reduce(x, scale=0.5 if comm.rank else lambda: 0.5), x * comm.size / 2)
                if comm.size == 1:
                    continue
                with pytest.raises(collectives.MismatchError, match=rf"{name} #\d+ +sum.* scale {mine!r} "):
                    call(x, scale=lambda: mine)
                with pytest.raises(collectives.MismatchError, match=rf"{name} #\d+ +sum.* scale {mine!r} "):
                    call(x, scale=(lambda: mine) if comm.rank else mine, async_op=True).wait()
                with pytest.raises(collectives.MismatchError, match=r"sum.* with a scale that failed") as raised:
                    call(x, scale=fail)
                assert isinstance(raised.value.__cause__, ZeroDivisionError | None)
                assert (raised.value.__cause__ is not None) == (comm.rank == comm.size - 1)
            assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)

    def test_a_function_that_gives_no_scale_on_any_rank_breaks_the_communicator(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for fail, said in ((lambda: "2", "scale should be a real number"), (lambda: None, "it returned no number")):
                twin = comm.duplicate()
                for _ in range(2):
                    with pytest.raises(
                        collectives.CollectivesError, match=f"the function given as scale failed: {said}"
                    ):
                        twin.all_reduce(np.ones(2), scale=fail)
                twin.close()

        run(check)

    def test_the_same_inputs_give_the_same_bits(self, run: Run) -> None:
        def check(comm: Communicator) -> bytes:
            x = np.random.default_rng(comm.rank).normal(size=3001).astype(np.float32)
            results = {comm.all_reduce(x).tobytes() for _ in range(5)}
            assert len(results) == 1
            everyones = comm.all_gather(np.frombuffer(next(iter(results)), np.uint8)).reshape(comm.size, -1)
            assert (everyones == everyones[0]).all()
            return next(iter(results))

        run(check)

    @pytest.mark.parametrize("dtype", [*HALVES, np.dtype("f"), np.dtype("d"), np.dtype("F"), np.dtype("i2")], ids=str)
    def test_in_tree_order_the_bits_are_known(self, run: Run, dtype: np.dtype[Any]) -> None:
        def check(comm: Communicator) -> None:
            for op, shape in itertools.product(("sum", "mean", "prod"), ((7, 3), (0, 2))):
                everyones = [np.random.default_rng(rank).normal(size=shape).astype(dtype) for rank in range(comm.size)]
                x = everyones[comm.rank]
                wire = wire_dtype(dtype, ReduceOp(op))
                total = combine_in_tree([each.astype(wire) for each in everyones], COMBINE[wire_op(ReduceOp(op))])
                divide_and_scale(total, ReduceOp(op), comm.size, None)
                want = total.astype(dtype)
                assert_array_equal(comm.all_reduce(x, op, order="tree").view(np.uint8), want.view(np.uint8))
                part = comm.reduce_scatter(x, op, order="tree")
                assert_array_equal(part.view(np.uint8), np.array_split(want, comm.size)[comm.rank].view(np.uint8))
                work = comm.all_reduce(x, op, order="tree", out=x, async_op=True)
                assert_array_equal(work.wait().view(np.uint8), want.view(np.uint8))
            zero = np.ones((), dtype)
            assert comm.all_reduce(zero, "mean", order="tree") == 1
            with pytest.raises(collectives.ArgumentError, match="order should be 'tree' or None, is 'ring'"):
                comm.all_reduce(zero, order="ring")
            if comm.size > 1:
                with pytest.raises(collectives.MismatchError, match="in tree order"):
                    comm.all_reduce(zero, order="tree" if comm.rank else None)

        run(check)

    def test_reduce_scatter_of_unusual_input(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            base = np.arange(24.0).reshape(4, 6) + comm.rank
            frozen = base.copy()
            frozen.flags.writeable = False
            for x in (base[::2, ::-3], base.T, np.asfortranarray(base), frozen, np.ones((comm.size, 0, 3))):
                y = comm.reduce_scatter(x)
                assert y.flags.c_contiguous
                assert_array_equal(y, np.array_split(comm.all_reduce(x), comm.size)[comm.rank])
            # The result may lie in the input.
            rows = np.arange(4.0 * comm.size).reshape(comm.size, 4)
            comm.reduce_scatter(rows, out=rows[:1])
            assert_array_equal(rows[0], comm.size * np.arange(4.0) + 4 * comm.size * comm.rank)
            with pytest.raises(collectives.ArgumentError, match="splits axis 0, and x is 0-d"):
                comm.reduce_scatter(np.float64(1))
            with pytest.raises(collectives.ArgumentError, match="add up to 0, x has 4 rows"):
                comm.reduce_scatter(base, lengths=[0] * comm.size)
            with pytest.raises(collectives.ArgumentError, match="lengths should be"):
                comm.reduce_scatter(base, lengths=[4] * (comm.size + 1))
            with pytest.raises(collectives.ArgumentError, match="out should be"):
                comm.reduce_scatter(base, out=np.ones((9, 9)))
            with pytest.raises(collectives.DtypeError, match="sum of bool"):
                comm.reduce_scatter(np.ones((4, 1), bool))

        run(check)

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_halves_are_summed_in_float32_and_rounded_once(self, run: Run, dtype: np.dtype[Any]) -> None:
        def check(comm: Communicator) -> None:
            # In the dtype itself, large + 1 is large again.
            large = 2.0 ** (np.finfo(np.float16).nmant + 1) if dtype == np.float16 else 2.0**8
            x = np.full((2, 3), large if comm.rank == 0 else 1.0).astype(dtype)
            total = np.float32(large + comm.size - 1)
            assert_array_equal(comm.all_reduce(x), np.full((2, 3), total).astype(dtype))
            assert_array_equal(
                comm.all_reduce(x, "mean", scale=3.0), np.full((2, 3), total / comm.size * 3).astype(dtype)
            )
            y = x.copy()
            assert comm.all_reduce(y, out=y) is y
            assert_array_equal(y, np.full((2, 3), total).astype(dtype))
            strided = np.zeros((2, 6), dtype)[:, ::2]
            assert comm.all_reduce(x.T, out=strided.T[:, :]).shape == (3, 2)
            assert_array_equal(strided, np.full((2, 3), total).astype(dtype))

        run(check)

    @pytest.mark.filterwarnings("ignore:invalid value")
    @pytest.mark.parametrize("dtype", [*HALVES, np.dtype("f"), np.dtype("d"), np.dtype("g")], ids=str)
    def test_nan_on_one_rank_is_the_max_and_the_min_of_all(self, run: Run, dtype: np.dtype[Any]) -> None:
        def check(comm: Communicator) -> None:
            for lost in range(comm.size):
                x = np.array([np.nan if comm.rank == lost else 1, comm.rank, -np.inf]).astype(dtype)
                for op, other in (("max", comm.size - 1), ("min", 0)):
                    expected = np.array([np.nan, other, -np.inf]).astype(dtype)
                    assert_array_equal(comm.all_reduce(x, op).astype(np.float64), expected.astype(np.float64))

        run(check)
