"""Calls whose arrays travel with the signatures give what all others give, whatever the other ranks do meanwhile."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from collectives import (
    ArgumentError,
    CollectiveInterrupted,
    Communicator,
    CommunicatorClosed,
    DtypeError,
    ReduceOp,
    run_threads,
)
from collectives.backends.shm.inline import InlineCalls
from collectives.backends.shm.segment import ControlBlock, inline_bytes
from collectives.engine.call import CollectiveOp
from collectives.errors import CollectivesError
from collectives.flight.recorder import Recorder
from collectives.time_limit import Deadline
from tests.collectives.backends.shm.ranks import run_sharing

PAIR = [0, 0]
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

    def ask(name: str, *args: Any, **options: Any) -> Any:
        return getattr(comm, name)(*args, async_op=async_op, **options)

    mine = x.copy()
    one_is_large = x if comm.rank == root else x[:1]
    results = [
        ask("all_reduce", x),
        ask("all_reduce", x, "mean"),
        ask("all_reduce", x, scale=0.5 if x.dtype.kind == "f" else None),
        ask("all_reduce", x, out=np.empty_like(x)),
        ask("all_reduce", mine, out=mine),
        ask("reduce", x, "max", root),
        ask("reduce_scatter", x),
        ask("broadcast", x.copy(), root),
        ask("gather", x, root),
        ask("gather", x[: comm.rank + 1], root),
        ask("gather", one_is_large, root),
        ask("all_gather", x),
        ask("all_gather", x, lengths="equal"),
        ask("all_gather", one_is_large),
        ask("scatter", x if comm.rank == root else None, root),
        ask("all_to_all", x),
        ask("all_to_all", one_is_large),
        ask("barrier"),
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

    assert run_sharing(check, [0] * size) == run_threads(check, size)
    assert inline[True] > 0


@pytest.mark.parametrize("size", [2, 4])
def test_what_changes_from_call_to_call_is_looked_at(inline: Counter[bool], size: int) -> None:
    def total(comm: Communicator, x: Any, **options: Any) -> Any:
        return comm.all_reduce(x, **options)  # one place for all of these

    def check(comm: Communicator) -> None:
        n = comm.size
        base = np.arange(12.0).reshape(3, 4)
        frozen = base.copy()
        frozen.flags.writeable = False
        for _ in range(3):
            for shape, dtype in itertools.product(((4,), (2, 2), (), (0,), (4, 1)), (np.float64, np.int32)):
                y = total(comm, np.full(shape, comm.rank, dtype))
                assert (y.shape, y.dtype) == (shape, dtype)
                assert (y == sum(range(n))).all()
            for x in (base, base[::-1], np.asfortranarray(base), np.repeat(base, 2, 1)[:, ::2], frozen):
                assert_array_equal(total(comm, x), n * x)
            for out in (np.empty((3, 4)), np.empty((3, 8))[:, ::2], np.empty((4, 3)).T):
                assert total(comm, base, out=out) is out
                assert_array_equal(out, n * base)
            for out, words in ((frozen, "read-only"), (np.empty(12), "out should be")):
                with pytest.raises(ArgumentError, match=words):
                    total(comm, base, out=out)
            for scale, factor in ((2, 2), (0.5, 0.5), (lambda: 0.25, 0.25)):
                assert_array_equal(total(comm, base, scale=scale), factor * n * base)
            for op in ("max", ReduceOp.MIN):
                assert_array_equal(total(comm, base, op=op), base)
            with pytest.raises(DtypeError, match="scale"):
                total(comm, np.arange(4), scale=0.5)

    run_sharing(check, [0] * size)
    assert inline[True] > 0


@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_change_on_one_rank_alone(inline: Counter[bool], size: int) -> None:
    def check(comm: Communicator) -> None:
        for step in range(20):
            rows = [1 + (step // 3 + rank) % 3 * (rank == step % size) for rank in range(size)]
            got = comm.all_gather(np.full(rows[comm.rank], comm.rank))
            assert_array_equal(got, np.repeat(np.arange(size), rows))
            parts = np.arange(size + 1 + step // 5 % 2)
            got = comm.scatter(parts if comm.rank == 0 else None)
            assert_array_equal(got, np.array_split(parts, size)[comm.rank])
            sent = [np.full(size + step // 4 % 2 * rank, rank) for rank in range(size)]
            want = [np.array_split(each, size)[comm.rank] for each in sent]
            assert_array_equal(comm.all_to_all(sent[comm.rank]), np.concatenate(want))

    run_sharing(check, [0] * size)
    assert inline[True] > 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ControlBlock, "all_arrive_soon"),
        (InlineCalls, "_combine"),
        (InlineCalls, "_lay_out"),
        (InlineCalls, "_steps"),
        (ControlBlock, "advanced"),
    ],
    ids=["met", "combine", "layout", "steps", "stages"],
)
def test_ctrl_c_in_the_middle_breaks_the_communicator(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    strikes: set[int] = set()
    wait = getattr(owner, name)

    def look(self: Any, *args: Any) -> bool:
        if threading.get_ident() in strikes and getattr(self, "_control", self).me == 0:
            strikes.clear()
            raise KeyboardInterrupt
        return wait(self, *args)

    monkeypatch.setattr(owner, name, look)
    x = np.ones(200_000 if name == "advanced" else 100)

    def check(comm: Communicator) -> str:
        lengths = itertools.count(1)

        def call_again_and_again() -> None:
            for _ in range(50):
                if name == "_steps" and comm.rank == 1:
                    time.sleep(1e-3)  # too late for the other to finish the call at once
                comm.all_reduce(x[: next(lengths)] if name == "_lay_out" else x)  # a layout is made for each shape

        call_again_and_again()
        comm.timeout = 1.0
        if comm.rank == 0:
            strikes.add(threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                call_again_and_again()
            with pytest.raises(CollectiveInterrupted) as caught:
                comm.all_reduce(x)
            with pytest.raises(CollectiveInterrupted):
                comm.barrier(async_op=True)
            done.set()
            comm.close()
            assert comm.queue.drain(Deadline(5))
            return str(caught.value)
        with pytest.raises(CollectivesError):
            call_again_and_again()
        assert done.wait(20)
        return ""

    done = threading.Event()
    told, _ = run_sharing(check, PAIR)
    assert re.search(r"all_reduce #.* was interrupted \(KeyboardInterrupt\)", told)


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
        def total(_: int) -> float:
            return float(comm.all_reduce(np.ones(5))[0])

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(total, range(150))) == [comm.size] * 150

    run_sharing(check, PAIR)
    assert inline[True] > 0


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
        def total() -> Any:
            return comm.all_reduce(np.ones(1))

        def refused(call: Callable[[], object], name: str) -> None:
            with pytest.raises(CollectivesError, match=rf"{name} .* is waited for in a done callback"):
                call()

        def close() -> None:
            refused(comm.barrier, "barrier")
            comm.close()

        for act in (lambda: refused(total, "all_reduce"), close):
            for turn in range(4):
                if turn == 3:
                    handler[comm.rank] = act
                assert total() == comm.size  # the call itself is finished
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
    run_sharing(check, PAIR)
