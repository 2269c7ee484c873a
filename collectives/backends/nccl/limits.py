"""Calls that may block for ever, made in a thread that can be left behind: C code cannot be interrupted otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from collectives.time_limit import TimeLimit

T = TypeVar("T")


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
