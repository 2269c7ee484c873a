"""Queues within one process, where every way to wait can be seen."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

import ddp
import ddp.multiprocessing as mp
from tests.ddp.multiprocessing.counting import descriptors


@pytest.fixture(params=["Queue", "JoinableQueue"])
def made(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = descriptors()
    it = getattr(mp, request.param)(2)
    yield it
    it.close()
    it.join_thread()
    assert descriptors() == before


def test_a_queue_keeps_its_order_and_its_bounds(made: Any) -> None:
    x = ddp.ones(3)
    made.put(x)
    made.put([ddp.zeros(2), "text"], timeout=1)
    with pytest.raises(queue.Full):
        made.put(3, block=False)
    with pytest.raises(queue.Full):
        made.put(3, timeout=0.01)
    assert made.qsize() == 2
    got = made.get()
    got.fill_(4)
    assert x.tolist() == [4, 4, 4]
    assert made.get(timeout=10)[1] == "text"
    assert made.empty()


def test_an_empty_queue(made: Any) -> None:
    for wait in ({"block": False}, {"timeout": 0.01}, {"timeout": 0}):
        with pytest.raises(queue.Empty):
            made.get(**wait)
    with pytest.raises(queue.Empty):
        made.get_nowait()


def test_a_closed_queue(made: Any) -> None:
    made.put(1)
    made.close()
    for call in (made.get, lambda: made.put(1)):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_start_methods() -> None:
    assert mp.get_all_start_methods() == ["spawn", "forkserver", "fork"]
    context = mp.get_context("forkserver")
    assert context.get_start_method() == "forkserver"
    assert context.get_context() is context
    assert type(context.SimpleQueue()) is type(mp.SimpleQueue())
    assert mp.get_start_method() == "spawn"
    with pytest.raises(RuntimeError, match="already been set"):
        mp.set_start_method("fork")
    with pytest.raises(ValueError, match="'thread': expected one of spawn"):
        mp.get_context("thread")
    try:
        mp.set_start_method("fork", force=True)
        assert mp.get_start_method() == "fork"
        assert mp.get_context() is mp.get_context("fork")
        mp.set_start_method(None, force=True)
        assert mp.get_start_method(allow_none=True) is None
    finally:
        mp.set_start_method("spawn", force=True)
