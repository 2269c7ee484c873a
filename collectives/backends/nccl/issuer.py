"""The threads that call NCCL: one that issues for all communicators of a device, and threads for calls that may block.

Two communicators of one device whose operations are started in different order on two ranks can wait for each other
for ever. So operations are handed to the device's issuer, in an order that is the same on all ranks. C code cannot be
interrupted, so a call that may block for ever is made in a daemon thread, which is left behind when its time is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from collectives.time_limit import TimeLimit

T = TypeVar("T")

_issuers: dict[int, Issuer] = {}
_lock = threading.Lock()


def issuer_of(device: int, enter: Callable[[], object] = lambda: None) -> Issuer:
    """The one issuer of a device, made at the first request; it lives as long as the process.

    enter: called once in the thread, to make the device its current one (`cupy.cuda.Device(i).use`)
    """
    with _lock:
        if device not in _issuers:
            _issuers[device] = Issuer(f"nccl-issuer-{device}", enter)
        return _issuers[device]


class Issuer:
    """A thread that carries out calls one after the other."""

    def __init__(self, name: str, enter: Callable[[], object] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._enter = enter
        threading.Thread(target=self._issue, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues `call`. Returns: a future of its result or exception."""
        outcome: Future[T] = Future()
        self._queue.put((outcome, call))
        return outcome

    def _issue(self) -> None:
        entered: Future[Any] = Future()
        _carry_out(self._enter, entered)
        while True:
            outcome, call = self._queue.get()
            if entered.exception() is None:
                _carry_out(call, outcome)
            else:
                error = RuntimeError("the issuing thread could not enter its device")
                error.__cause__ = entered.exception()
                outcome.set_exception(error)
            del outcome, call  # an idle thread must not keep what they hold


class StillRunning(Exception):
    """The call has not returned in time; its thread goes on, and its outcome is lost. Or the process is ending."""


def run_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs `call` in a daemon thread called `name`. Returns: a future of its result or exception."""
    outcome: Future[T] = Future()
    try:
        threading.Thread(target=_carry_out, args=(call, outcome), name=name, daemon=True).start()
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        # From Python 3.12 on no thread starts any more once the script has ended; and here it could wait for ever.
        outcome.set_exception(StillRunning(f"{name}: {error}"))
    return outcome


def run_within(seconds: float, call: Callable[[], T], name: str) -> T:
    """What `call` returns or raises, if it does so in time; it runs in a daemon thread called `name`.

    Raises: StillRunning after `seconds`.
    """
    outcome = run_in_thread(call, name)
    limit = TimeLimit(seconds)
    while not outcome.done():
        if limit.passed():
            raise StillRunning(name)
        wait([outcome], timeout=limit.remaining())
    return outcome.result()


def _carry_out(call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # raised where the outcome is waited for
        outcome.set_exception(error)
