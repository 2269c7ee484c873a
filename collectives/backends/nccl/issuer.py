"""The threads that call NCCL: one that issues for all communicators of a device, and threads for calls that may block.

Two communicators of one device whose operations are started in different order on two ranks can wait for each other
for ever. So operations are handed to the device's issuer, in an order that is the same on all ranks. Calls that may
block for ever are made in a thread that can be left behind: C code cannot be interrupted otherwise.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from collectives.time_limit import TimeLimit

T = TypeVar("T")

_threads: dict[int, Issuer] = {}
_lock = threading.Lock()


def of_device(device: int, enter: Callable[[], object] = lambda: None) -> Issuer:
    """The one issuer of a device, made when it is first asked for; it lives as long as the process.

    enter: called once in the thread, to make the device its current one (`cupy.cuda.Device(i).use`)
    """
    with _lock:
        if device not in _threads:
            _threads[device] = Issuer(f"nccl-issuer-{device}", enter)
        return _threads[device]


class Issuer:
    """A thread that carries out what it is handed, one after the other."""

    def __init__(self, name: str, enter: Callable[[], object] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._issue, args=(enter,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Has `call` carried out after all that were handed over before; its result or exception is the future's."""
        outcome: Future[T] = Future()
        self._queue.put((outcome, call))
        return outcome

    def _issue(self, enter: Callable[[], object]) -> None:
        trouble: BaseException | None = None
        try:
            enter()
        except BaseException as error:  # raised for every call that is handed over
            trouble = error
        while True:
            outcome, call = self._queue.get()
            if outcome.set_running_or_notify_cancel():
                try:
                    if trouble is not None:
                        raise RuntimeError("the issuing thread could not enter its device") from trouble
                    outcome.set_result(call())
                except BaseException as error:
                    outcome.set_exception(error)
            del outcome, call  # an idle thread must not keep what they hold


class StillRunning(Exception):
    """The call has not returned in time; its thread goes on, and its outcome is lost. Or the process is ending."""


def run_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """What `call` will have returned or raised; it runs in a daemon thread called `name`, which may be left behind."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised where it is waited for
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
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
