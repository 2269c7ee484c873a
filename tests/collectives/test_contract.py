"""What every backend owes: one class of tests, run on each backend. No test here knows how many ranks there are."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator, world

Run = Callable[[Callable[[Communicator], Any]], list[Any]]
REDUCIBLE = [np.float32, np.float64, np.float16, np.int8, np.uint8, np.int32, np.int64, np.uint64, np.complex64]


class Contract:
    """A backend's tests inherit this and provide `run`, which calls a function on every rank."""

    @pytest.mark.parametrize("dtype", REDUCIBLE)
    def test_all_reduce_sums_over_ranks(self, run: Run, dtype: type) -> None:
        def check(comm: Communicator) -> None:
            x = np.arange(6, dtype=dtype).reshape(2, 3) + dtype(comm.rank)
            y = comm.all_reduce(x)
            assert y.dtype == dtype
            assert_array_equal(y, comm.size * np.arange(6).reshape(2, 3) + sum(range(comm.size)))
            assert_array_equal(x, np.arange(6).reshape(2, 3) + comm.rank)

        run(check)

    @pytest.mark.parametrize(
        ("op", "expected"), [("max", np.max), ("min", np.min), ("prod", np.prod), ("mean", np.mean)]
    )
    def test_all_reduce_has_every_op(self, run: Run, op: str, expected: Callable[..., Any]) -> None:
        def check(comm: Communicator) -> None:
            everyones = np.array([[rank + 1.0, -rank, 2.0] for rank in range(comm.size)])
            assert_array_equal(comm.all_reduce(everyones[comm.rank], op), expected(everyones, axis=0))
            root = comm.size - 1
            on_root = comm.reduce(everyones[comm.rank], collectives.ReduceOp(op), root)
            if comm.rank == root:
                assert_array_equal(on_root, expected(everyones, axis=0))
            else:
                assert on_root is None

        run(check)

    def test_mean_of_integers_is_rounded_toward_zero(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            mine = np.array([-comm.rank, comm.rank, -(2**53) - 1])
            total = comm.size * (comm.size - 1) // 2
            y = comm.all_reduce(mine, "mean")
            assert y.tolist() == [-(total // comm.size), total // comm.size, -(2**53) - 1]

        run(check)

    def test_mean_of_small_integers_does_not_wrap(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            y = comm.all_reduce(np.full(3, 120, np.int8), "mean")
            assert y.dtype == np.int8
            assert y.tolist() == [120] * 3

        run(check)

    @pytest.mark.filterwarnings("ignore:invalid value")
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_nan_wins_max_and_min_on_every_rank(self, run: Run, dtype: type) -> None:
        def check(comm: Communicator) -> None:
            for lost in range(comm.size):
                x = np.array([np.nan if comm.rank == lost else 1, comm.rank], dtype)
                for op, other in (("max", comm.size - 1), ("min", 0)):
                    assert_array_equal(comm.all_reduce(x, op), np.array([np.nan, other], dtype))
                    on_root = comm.reduce(x, op, root=0)
                    assert on_root is None or np.isnan(on_root[0])

        run(check)

    def test_float16_is_summed_in_float32(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            # In float16, 2048 + 1 is 2048 again; the sum of many such steps would be lost.
            x = np.full(4, 2048 if comm.rank == 0 else 1, np.float16)
            assert_array_equal(comm.all_reduce(x), np.float16(np.float32(2048 + comm.size - 1)))

        run(check)

    def test_bool_has_max_and_min_only(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            mine = np.array([True, False, comm.rank == 0])
            y = comm.all_reduce(mine, "max")
            assert y.dtype == bool
            assert y.tolist() == [True, False, True]
            assert comm.all_reduce(mine, "min").tolist() == [True, False, comm.size == 1]
            with pytest.raises(collectives.DtypeError, match="sum of bool is not defined: it has max, min"):
                comm.all_reduce(mine)

        run(check)

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

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 3)])
    def test_shapes_without_many_elements(self, run: Run, shape: tuple[int, ...]) -> None:
        def check(comm: Communicator) -> None:
            x = np.ones(shape)
            assert_array_equal(comm.all_reduce(x), np.full(shape, comm.size))
            assert comm.all_reduce(x).shape == shape
            assert_array_equal(comm.broadcast(np.full(shape, float(comm.rank))), np.zeros(shape))
            whole = comm.all_gather(x)
            assert whole.shape == ((comm.size,) if shape == () else (comm.size * shape[0], *shape[1:]))

        run(check)

    def test_strided_fortran_and_read_only_input(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            base = np.arange(24.0).reshape(4, 6) + comm.rank
            extra = sum(range(comm.size))
            frozen = base.copy()
            frozen.flags.writeable = False
            for x in (base[::2, ::-3], base.T, np.asfortranarray(base), frozen):
                y = comm.all_reduce(x)
                assert y.flags.c_contiguous
                assert_array_equal(y, (x - comm.rank) * comm.size + extra)
                assert_array_equal(comm.all_gather(x)[: len(x)], x - comm.rank)

        run(check)

    def test_out_in_place_and_beside(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for dtype in (np.float32, np.float16):
                x = np.full((2, 3), comm.rank + 1, dtype)
                expected = np.full((2, 3), sum(range(comm.size + 1)), dtype)
                out = np.empty_like(x)
                assert comm.all_reduce(x, out=out) is out
                assert_array_equal(out, expected)
                strided = np.zeros((2, 6), dtype)[:, ::2]
                assert comm.all_reduce(x, out=strided) is strided
                assert_array_equal(strided, expected)
                assert comm.all_reduce(x, out=x) is x
                assert_array_equal(x, expected)

        run(check)

    def test_out_may_overlap_the_input(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            base = np.arange(10.0)
            comm.all_reduce(base[:8], out=base[2:])
            assert_array_equal(base[2:], comm.size * np.arange(8))

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

    def test_gather_with_equal_lengths_and_out(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            out = np.empty((comm.size * 2, 2), np.float32)
            mine = np.full((2, 2), comm.rank, np.float32)
            expected = np.repeat(np.arange(comm.size), 2)[:, None] * np.ones(2)
            assert comm.all_gather(mine, lengths="equal", out=out) is out
            assert_array_equal(out, expected)
            strided = np.empty((comm.size * 2, 4), np.float32)[:, ::2]
            assert comm.gather(mine, 0, lengths="equal", out=strided) is (strided if comm.rank == 0 else None)
            if comm.rank == 0:
                assert_array_equal(strided, expected)

        run(check)

    def test_scalars_are_gathered_into_a_vector(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            assert comm.all_gather(np.float32(comm.rank)).tolist() == list(range(comm.size))
            assert comm.all_gather(np.array(comm.rank), lengths="equal").tolist() == list(range(comm.size))

        run(check)

    def test_rows_that_differ_in_shape_or_dtype_are_named_on_every_rank(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            if comm.size > 1:
                with pytest.raises(collectives.MismatchError, match=f"rank {comm.rank} brings rows of float64"):
                    comm.all_gather(np.ones((1, 3 if comm.rank == 1 else 2)))
                assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)

    @pytest.mark.parametrize("rows", [0, 1, 7])
    def test_scatter_splits_as_array_split_does(self, run: Run, rows: int) -> None:
        def check(comm: Communicator) -> None:
            whole = np.arange(rows * 2, dtype=np.int16).reshape(rows, 2)
            for root in (0, comm.size - 1):
                mine = comm.scatter(whole if comm.rank == root else None, root)
                assert mine.dtype == np.int16
                assert_array_equal(mine, np.array_split(whole, comm.size)[comm.rank])

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

    def test_gathering_what_was_scattered_gives_it_back(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            whole = np.random.default_rng(0).normal(size=(13, 3))
            back = comm.gather(comm.scatter(whole))
            if comm.rank == 0:
                assert_array_equal(back, whole)

        run(check)

    def test_roots_lengths_and_ops_that_do_not_exist(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            with pytest.raises(collectives.ArgumentError, match=f"root should be a rank from 0 to {comm.size - 1}"):
                comm.reduce(np.ones(1), root=comm.size)
            with pytest.raises(collectives.ArgumentError, match="root"):
                comm.broadcast(np.ones(1), root=-1)
            with pytest.raises(collectives.ArgumentError, match="op should be one of sum, mean, max, min, prod"):
                comm.all_reduce(np.ones(1), "average")
            with pytest.raises(collectives.ArgumentError, match="lengths should be"):
                comm.all_gather(np.ones(1), lengths=[1] * (comm.size + 1))
            with pytest.raises(collectives.ArgumentError, match="but x has 1 rows"):
                comm.all_gather(np.ones(1), lengths=[2] * comm.size)

        run(check)

    def test_asynchronous_calls_complete_in_order_and_mix_with_synchronous_ones(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            works = [comm.all_reduce(np.full(1000, i), async_op=True) for i in range(20)]
            now = comm.all_reduce(np.ones(3))
            assert_array_equal(now, np.full(3, comm.size))
            assert all(work.done() for work in works)  # a synchronous call comes after what was queued
            for i, work in enumerate(works):
                assert_array_equal(work.wait(), np.full(1000, i * comm.size))
                assert work.wait() is work.wait()
            gathered = comm.all_gather(np.array([comm.rank]), async_op=True)
            assert comm.barrier(async_op=True).wait(timeout=20) is None
            assert gathered.wait().tolist() == list(range(comm.size))

        run(check)

    def test_a_duplicate_is_a_world_of_its_own(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            twin = comm.duplicate()
            assert (twin.rank, twin.size, twin.key) == (
                comm.rank,
                comm.size,
                comm.key + "." + twin.key.rpartition(".")[2],
            )
            # The two are used in different order on different ranks.
            pair = (comm, twin) if comm.rank % 2 == 0 else (twin, comm)
            works = {each.key: each.all_reduce(np.array([len(each.key)]), async_op=True) for each in pair}
            assert {key: int(work.wait()[0]) for key, work in works.items()} == {
                key: len(key) * comm.size for key in works
            }
            twin.close()
            with pytest.raises(collectives.CommunicatorClosed):
                twin.barrier()
            comm.barrier()

        run(check)

    def test_closed_duplicates_are_given_back(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for _ in range(2100):  # an MPI has about 2,000
                comm.duplicate().close()
            twin = comm.duplicate()
            work = twin.all_reduce(np.ones(1), async_op=True)
            twin.close()  # what is under way is finished
            assert work.wait() == comm.size

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

    def test_other_libraries_arrays_are_taken_by_their_interfaces(self, run: Run) -> None:
        class Interface:
            def __init__(self, array: Any) -> None:
                self.__array_interface__ = array.__array_interface__
                self.array = array

        class Dlpack:
            def __init__(self, array: Any) -> None:
                self.array = array
                self.__dlpack__ = array.__dlpack__
                self.__dlpack_device__ = array.__dlpack_device__

        def check(comm: Communicator) -> None:
            for kind in (Interface, Dlpack):
                x = kind(np.full(3, comm.rank + 1.0))
                assert_array_equal(comm.all_reduce(x), np.full(3, sum(range(comm.size + 1))))
            inside = Interface(np.full(3, comm.rank + 1.0))
            comm.all_reduce(inside, out=inside)
            assert_array_equal(inside.array, np.full(3, sum(range(comm.size + 1))))

        run(check)


class TestSingle(Contract):
    @pytest.fixture
    def run(self) -> Run:
        from collectives._single import SingleTransport

        return lambda fn: [fn(Communicator(SingleTransport(), timeout=20))]


class TestThreads(Contract):
    @pytest.fixture(params=[1, 2, 3, 4])
    def run(self, request: pytest.FixtureRequest) -> Run:
        return functools.partial(collectives.run_threads, size=request.param, timeout=20)


if world.promised() is not None:  # inside the job that the last test starts

    class TestMPI(Contract):
        @pytest.fixture
        def run(self) -> Run:
            comm = collectives.init("mpi", timeout=20)
            return lambda fn: [fn(comm)]


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 3])
def test_the_contract_holds_over_mpi(
    run_job: Callable[..., subprocess.CompletedProcess[str]], mpiexec: list[str], size: int
) -> None:
    pytest_ = [sys.executable, "-m", "pytest", __file__, "-q", "-x", "-k", "TestMPI", "-p", "no:cacheprovider"]
    done = run_job([*mpiexec, "-n", str(size), *pytest_], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == size
