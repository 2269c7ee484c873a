"""The issuing thread: one order, outcomes to whoever waits, nothing kept alive; and calls with a time limit."""

from __future__ import annotations

import threading

import pytest

from collectives.backends.device.nccl_transport import Issuer


def test_calls_are_made_in_order_in_one_thread() -> None:
    thread = Issuer("test-issuer")
    made: list[int] = []
    gate = threading.Event()
    waiting = [thread.submit(gate.wait), *(thread.submit(lambda k=k: made.append(k)) for k in range(100))]
    assert made == []
    gate.set()
    for each in waiting:
        each.result(10)
    assert made == list(range(100))
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 / 0).result(10)
    assert thread.submit(lambda: threading.current_thread().name).result(10) == "test-issuer"
