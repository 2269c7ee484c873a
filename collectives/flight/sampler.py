"""Where the main thread's Python stands, written into the flight record once a second.

A rank that never reaches a collective is in some loop of the user's code, and its peers, which run into their time
limit, should be able to say in which. A thread of this process takes the sample: where the main thread computes without
letting go of the GIL there is none, and the age of the last one tells so.
"""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from collectives.flight.recorder import Location, Recorder

PERIOD = 1.0  # s

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(_ROOT, package) + os.sep for package in ("collectives", "ddp", "launcher"))
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def start_sampler(recorder: Recorder, period: float = PERIOD) -> None:
    """Starts a daemon thread that samples the main thread now and every `period` seconds, until the process ends."""
    over = threading.Event()

    def sample() -> None:
        while True:
            where = main_thread_position()
            if where is not None:
                recorder.record_position(*where)
            if over.wait(period):
                return

    threading.Thread(target=sample, name="flight-sampler", daemon=True).start()
    atexit.register(over.set)


def main_thread_position() -> tuple[Location, Location | None] | None:
    """Where the main thread stands: the innermost frame of the user's code, and that of a library below it, if any.

    None if there is no main thread any more.
    """
    frames = _stack(threading.main_thread().ident or 0)
    if not frames:
        return None
    innermost = _location(frames[0])
    outside: Location | None = None  # of our packages, but a library's
    for each in frames:
        file = each.f_code.co_filename
        if not file.startswith(_OURS):
            if not _is_library(file):
                at = _location(each)
                return at, None if each is frames[0] else innermost
            if outside is None:
                outside = _location(each)
    at = outside or innermost
    return at, None if at == innermost else innermost


def _stack(thread: int) -> list[FrameType]:
    """The frames of another thread, the innermost first.

    That thread goes on whenever the interpreter's lock changes hands, and CPython 3.11 has crashed where `f_back` was
    asked for between two of its steps. One call of a function in C finds them all, so that the lock stays here.
    """
    found: list[FrameType] = []
    innermost = map(operator.itemgetter(thread), itertools.starmap(sys._current_frames, [()]))
    steps: Iterator[Any] = itertools.chain(innermost, itertools.repeat("f_back"))
    try:
        found.extend(itertools.accumulate(steps, getattr))
    except (KeyError, AttributeError):
        pass  # no such thread; and behind the outermost frame comes None, which has none
    return found[:-1]


def _location(frame: FrameType) -> Location:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name


def _is_library(file: str) -> bool:
    return file.startswith((_STANDARD, "<frozen ")) or any(folder in file for folder in _INSTALLED)
