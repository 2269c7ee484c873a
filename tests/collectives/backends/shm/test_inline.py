"""Calls whose arrays travel with the signatures give what all others give, whatever the other ranks do meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
import ddp
from collectives import Communicator, CommunicatorClosed
from collectives.backends.shm.inline import InlineCalls
from collectives.backends.shm.segment import ControlBlock, inline_bytes
from collectives.engine.call import CollectiveOp
from collectives.errors import CollectivesError, MismatchError
from collectives.flight.recorder import Recorder
from collectives.time_limit import Deadline
from tests.collectives.backends.shm.ranks import run_sharing

LENGTHS = [1, inline_bytes(2) // 8, inline_bytes(2) // 8 + 1]


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many calls were carried out from inline buffers, and how many went on as on other transports."""
    counted: Counter[bool] = Counter()
    combine = InlineCalls._combine

    def counting(self: InlineCalls, *args: Any) -> bool:
        result = combine(self, *args)
        counted[result] += 1
        return result

    monkeypatch.setattr(InlineCalls, "_combine", counting)
    return counted


def all_calls(comm: Communicator, x: Any, root: int, async_op: bool = False) -> list[Any]:
    """What every collective gives. async_op: all are asked for before any is waited for"""
    mine = x.copy()
    one_is_large = x if comm.rank == root else x[:1]
    results = [
        comm.all_reduce(x, async_op=async_op),
        comm.all_reduce(x, "mean", async_op=async_op),
        comm.all_reduce(x, scale=0.5 if x.dtype.kind == "f" else None, async_op=async_op),
        comm.all_reduce(x, out=np.empty_like(x), async_op=async_op),
        comm.all_reduce(mine, out=mine, async_op=async_op),
        comm.reduce(x, "max", root, async_op=async_op),
        comm.reduce_scatter(x, async_op=async_op),
        comm.broadcast(x.copy(), root, async_op=async_op),
        comm.gather(x, root, async_op=async_op),
        comm.gather(x[: comm.rank + 1], root, async_op=async_op),
        comm.gather(one_is_large, root, async_op=async_op),
        comm.all_gather(x, async_op=async_op),
        comm.all_gather(x, lengths="equal", async_op=async_op),
        comm.all_gather(one_is_large, async_op=async_op),
        comm.scatter(x if comm.rank == root else None, root, async_op=async_op),
        comm.all_to_all(x, async_op=async_op),
        comm.all_to_all(one_is_large, async_op=async_op),
        comm.barrier(async_op=async_op),
    ]
    if async_op:
        results = [work.wait() for work in results]
    return [None if result is None else (result.dtype, result.shape, result.tobytes()) for result in results]


@pytest.mark.parametrize(("size", "dtype"), [(2, "f4"), (3, "f2"), (2, ">f8"), (5, "i4")])
def test_the_same_bits_as_the_general_way(inline: Counter[bool], size: int, dtype: str) -> None:
    def check(comm: Communicator) -> list[Any]:
        results = []
        for length in LENGTHS:
            x = np.random.default_rng([length, comm.rank]).normal(0, 9, length).astype(dtype)
            first = all_calls(comm, x, comm.size - 1)  # which makes the plans
            for async_op in (False, True):
                assert all_calls(comm, x, comm.size - 1, async_op) == first
            results.append(first)
        return results

    assert run_sharing(check, [0] * size) == collectives.run_threads(check, size)
    assert inline[True] > 0


@pytest.mark.parametrize("size", [2, 5])
def test_what_changes_from_call_to_call_is_looked_at(inline: Counter[bool], size: int) -> None:
    def total(comm: Communicator, x: Any, **options: Any) -> Any:
        return comm.all_reduce(x, **options)  # one place for all of these

    def check(comm: Communicator) -> None:
        n = comm.size
        sum_of_ranks = sum(range(comm.size))
        for _ in range(3):
            for shape in ((4,), (2, 2), (), (0,), (4, 1)):
                for dtype in (np.float64, np.int32):
                    x = np.full(shape, comm.rank, dtype)
                    y = total(comm, x)
                    assert (y.shape, y.dtype) == (shape, dtype)
                    assert (y == sum_of_ranks).all()
            base = np.arange(12.0).reshape(3, 4)
            for x in (base, base[::-1], base.T.copy().T, np.asfortranarray(base), np.repeat(base, 2, 1)[:, ::2]):
                assert_array_equal(total(comm, x), n * x)
            frozen = base.copy()
            frozen.flags.writeable = False
            assert_array_equal(total(comm, frozen), n * base)
            for out in (np.empty((3, 4)), np.empty((3, 8))[:, ::2], np.empty((4, 3)).T):
                assert total(comm, base, out=out) is out
                assert_array_equal(out, n * base)
            both = np.arange(20.0)
            total(comm, both[:12], out=both[8:])
            assert_array_equal(both[8:], n * np.arange(12.0))
            with pytest.raises(collectives.ArgumentError, match="read-only"):
                total(comm, base, out=frozen)
            with pytest.raises(collectives.ArgumentError, match="out should be"):
                total(comm, base, out=np.empty(12))
            assert_array_equal(total(comm, base, scale=2), 2 * n * base)
            assert_array_equal(total(comm, base, scale=0.5), n / 2 * base)
            assert_array_equal(total(comm, base, scale=lambda: 0.25), n / 4 * base)
            assert_array_equal(total(comm, base, op="max"), base)
            assert_array_equal(total(comm, base, op=collectives.ReduceOp.MIN), base)
            assert_array_equal(total(comm, base.view(np.recarray)), n * base)
            with pytest.raises(collectives.DtypeError):
                total(comm, np.array([True]))
            with pytest.raises(collectives.DtypeError, match="scale"):
                total(comm, np.arange(4), scale=0.5)
            assert_array_equal(total(comm, np.array([comm.rank == 0]), op="max"), [True])

    run_sharing(check, [0] * size)
    assert inline[True] > 0


@pytest.mark.parametrize("size", [2, 5])
def test_rows_that_change_on_one_rank_alone(inline: Counter[bool], size: int) -> None:
    def check(comm: Communicator) -> None:
        for step in range(20):
            rows = [1 + (step // 3 + rank) % 3 * (rank == step % comm.size) for rank in range(comm.size)]
            got = comm.all_gather(np.full(rows[comm.rank], comm.rank))
            assert_array_equal(got, np.repeat(np.arange(comm.size), rows))
            parts = np.arange(comm.size + 1 + step // 5 % 2) if comm.rank == 0 else None
            assert_array_equal(
                comm.scatter(parts), np.array_split(np.arange(comm.size + 1 + step // 5 % 2), size)[comm.rank]
            )
            x = np.full(comm.size + (step // 4 % 2) * comm.rank, comm.rank)
            want = [
                len(np.array_split(np.empty(size + (step // 4 % 2) * rank), size)[comm.rank]) for rank in range(size)
            ]
            assert_array_equal(comm.all_to_all(x), np.repeat(np.arange(size), want))

    run_sharing(check, [0] * size)
    assert inline[True] > 0


@pytest.mark.parametrize("size", [2, 5])
def test_a_rank_that_comes_late_or_queues_its_calls_finds_the_others_there(inline: Counter[bool], size: int) -> None:
    def check(comm: Communicator) -> None:
        rng = np.random.default_rng(comm.rank)
        for step in range(60):
            if rng.integers(4) == 0:
                time.sleep(float(rng.random()) * 1e-3)
            x = np.full(50, step + comm.rank)
            # Some ranks make this call from their helper thread, others at once.
            queued = rng.integers(3) == 0
            y = comm.all_reduce(x, async_op=True).wait(timeout=20) if queued else comm.all_reduce(x)
            assert (y == size * step + sum(range(size))).all()

    run_sharing(check, [0] * size)
    assert inline[True] > 0


@pytest.mark.parametrize("size", [2, 5])
def test_another_call_on_another_rank_is_told_to_all_and_forgotten(inline: Counter[bool], size: int) -> None:
    def check(comm: Communicator) -> None:
        for step in range(30):

            def call(odd: bool) -> Any:
                return comm.all_gather(np.ones(4)) if odd else comm.all_reduce(np.ones(4))

            if step % 10 != 9:
                assert (call(odd=False) == comm.size).all()
                continue
            with pytest.raises(collectives.MismatchError, match=rf"all_reduce #{step} ") as caught:
                call(odd=comm.rank == step // 10 % comm.size)
            assert f"all_gather #{step} " in str(caught.value)

    run_sharing(check, [0] * size)
    assert inline[True] > 0


@pytest.mark.parametrize("where", ["met", "combine", "layout", "steps", "stages"])
def test_ctrl_c_in_the_middle_breaks_the_communicator(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    strikes: set[int] = set()

    def striking(wait: Callable[..., bool]) -> Callable[..., bool]:
        def look(self: Any, *args: Any) -> bool:
            control = getattr(self, "_control", self)
            if threading.get_ident() in strikes and control.me == 0:
                strikes.clear()
                raise KeyboardInterrupt
            return wait(self, *args)

        return look

    waits = {
        "met": (ControlBlock, "all_arrive_soon"),
        "combine": (InlineCalls, "_combine"),
        "layout": (InlineCalls, "_lay_out"),
        "steps": (InlineCalls, "_steps"),
        "stages": (ControlBlock, "advanced"),
    }
    owner, name = waits[where]
    monkeypatch.setattr(owner, name, striking(getattr(owner, name)))
    x = np.ones(200_000 if where == "stages" else 100)

    def check(comm: Communicator) -> str:
        lengths = itertools.count(1)

        def call_again_and_again() -> None:
            for _ in range(50):
                if where == "steps" and comm.rank == 1:
                    time.sleep(1e-3)  # too late for the other to finish the call at once
                comm.all_reduce(x[: next(lengths)] if where == "layout" else x)  # a layout is made for each shape

        call_again_and_again()
        comm.timeout = 1.0
        if comm.rank == 0:
            strikes.add(threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                call_again_and_again()
            with pytest.raises(collectives.CollectiveInterrupted) as caught:
                comm.all_reduce(x)
            with pytest.raises(collectives.CollectiveInterrupted):
                comm.barrier(async_op=True)
            done.set()
            comm.close()
            assert comm.queue.drain(Deadline(5))
            return str(caught.value)
        with pytest.raises(collectives.CollectivesError):
            call_again_and_again()
        assert done.wait(20)
        return ""

    done = threading.Event()
    told, _ = run_sharing(check, [0, 0])
    assert "all_reduce #" in told
    assert "was interrupted (KeyboardInterrupt)" in told


PAIR = [0, 0]


def test_lengths_that_change_in_place_are_read_again() -> None:
    def check(comm: Communicator) -> None:
        lengths = ddp.tensor([1, 3])
        x = np.arange(4)
        for first in (1, 1, 3, 0):
            lengths[0] = first
            lengths[1] = 4 - first
            parts: Any = lengths
            got = comm.reduce_scatter(x, lengths=parts), comm.scatter(x, lengths=parts)
            want = np.split(x, [first])[comm.rank]
            assert [each.tolist() for each in got] == [(2 * want).tolist(), want.tolist()]

    run_sharing(check, PAIR)


def test_threads_that_share_a_communicator_take_turns(inline: Counter[bool]) -> None:
    def check(comm: Communicator) -> None:
        def work() -> None:
            for _ in range(50):
                totals.append(float(comm.all_reduce(np.ones(5))[0]))

        totals: list[float] = []
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert totals == [comm.size] * 150

    run_sharing(check, PAIR)
    assert inline[True] > 0


@pytest.mark.parametrize("run", [run_sharing, lambda fn, nodes: collectives.run_threads(fn, len(nodes), timeout=20)])
def test_a_duplicate_is_the_same_one_on_all_ranks_after_a_mismatch(run: Callable[..., list[str]]) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(MismatchError):
            comm.duplicate() if comm.rank else comm.barrier()
        with pytest.raises(MismatchError):
            comm.split(0) if comm.rank else comm.barrier()
        twin = comm.duplicate()
        part = comm.split(comm.rank == 5)
        assert part is not None
        twin.barrier()
        part.barrier()
        return f"{twin.key} {part.key}"

    assert len(set(run(body, PAIR))) == 1


@pytest.mark.parametrize("nodes", [PAIR, [0, 0, 1]])
def test_numpys_error_state_does_not_reach_into_long_reductions(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        huge = np.full(40_000, 3e38, np.float32)
        with np.errstate(all="raise" if comm.rank == 0 else "warn"):  # pytest makes warnings errors
            for _ in range(2):
                assert np.isinf(comm.all_reduce(huge, scale=2.0)).all()

    run_sharing(body, nodes)


def test_a_signal_handler_in_the_middle_of_a_call_may_close_but_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    handler: dict[int, Callable[[], None]] = {}
    combine = InlineCalls._combine

    def interrupted(self: Any, *args: Any) -> bool:  # where a signal's handler would run
        handler.pop(self._control.me, lambda: None)()
        return combine(self, *args)

    monkeypatch.setattr(InlineCalls, "_combine", interrupted)

    def body(comm: Communicator) -> None:
        def close() -> None:
            with pytest.raises(CollectivesError, match=r"barrier .* is waited for in a done callback"):
                comm.barrier()
            comm.close()

        def call() -> None:
            with pytest.raises(CollectivesError, match=r"all_reduce .* is waited for in a done callback"):
                total()

        def total() -> Any:
            return comm.all_reduce(np.ones(1))

        for turn in range(4):
            if turn == 3:
                handler[comm.rank] = call
            assert total() == comm.size
        for turn in range(4):
            if turn == 3:
                handler[comm.rank] = close
            assert comm.all_reduce(np.ones(1)) == comm.size  # the call itself is finished
        with pytest.raises(CommunicatorClosed):
            comm.barrier()

    run_sharing(body, PAIR)


@pytest.mark.parametrize("where", [(CollectiveOp, "set_outcome"), (Recorder, "end")], ids=["set_outcome", "end"])
def test_ctrl_c_at_the_end_of_a_call_ends_it(where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    struck = threading.local()
    owner, name = where
    whole = getattr(owner, name)

    def strike(*args: Any) -> Any:
        if getattr(struck, "next", False):
            struck.next = False
            raise KeyboardInterrupt
        return whole(*args)

    def check(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            comm.all_reduce(np.ones(2))
            return
        time.sleep(0.1)  # the other rank has come: the call is complete in its first step
        struck.next = True
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(np.ones(2), async_op=True)
        with pytest.raises(CollectivesError, match=r"all_reduce #1 .* was interrupted"):
            comm.all_reduce(np.ones(2))  # else it would show the signature of the call before a second time

    monkeypatch.setattr(owner, name, strike)
    run_sharing(check, [0, 0])
