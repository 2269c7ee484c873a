"""The issuing thread: one order, outcomes to whoever waits, nothing kept alive; and calls with a time limit."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from collectives.backends.device.nccl_transport import Issuer
from collectives.time_limit import StillRunning, run_within


def refuse() -> None:
    raise OSError("no such device")


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


def test_a_thread_that_cannot_enter_its_device_says_so_to_everybody() -> None:
    thread = Issuer("test-issuer", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not enter its device") as caught:
            thread.submit(lambda: 1).result(10)
        assert isinstance(caught.value.__cause__, OSError)


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Buffer:
        pass

    thread = Issuer("test-issuer")
    buffer = Buffer()
    kept = weakref.ref(buffer)
    thread.submit(lambda held=buffer: None).result(10)
    del buffer
    thread.submit(threading.get_ident).result(10)  # the one before is over and gone
    gc.collect()
    assert kept() is None


def test_in_time_and_too_late() -> None:
    release = threading.Event()
    assert run_within(20, lambda: 3, "three") == 3
    with pytest.raises(ZeroDivisionError):
        run_within(20, lambda: 1 // 0, "one")
    with pytest.raises(StillRunning, match="late"):
        run_within(0.05, release.wait, "late")
    release.set()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("can't create new thread at interpreter shutdown", StillRunning),  # from Python 3.12 on
        ("can't start new thread", RuntimeError),  # the process has too many
    ],
)
def test_where_no_thread_starts(words: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(kind, match=words):
        run_within(20, lambda: 3, "three")
