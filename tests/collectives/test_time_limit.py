"""While the job stands still no time limit runs, and what it stood still is not counted afterwards."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from collectives import Communicator, run_threads, time_limit, world
from collectives.errors import CollectiveTimeout
from collectives.time_limit import StillRunning, run_within

SECOND = 10**9


class Page:
    """What an agent writes, and a clock that a test sets."""

    def __init__(self) -> None:
        self.words = array("q", [0, 0])
        self.now = 1000.0

    def begin(self) -> None:
        self.words[0] = 1

    def end(self, seconds: float) -> None:
        self.words[1] += int(seconds * SECOND)
        self.words[0] = 0


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(time_limit, "_words", page.words)
    return page


@pytest.fixture
def clock(page: Page, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(time, "monotonic", lambda: page.now)
    return page


def test_a_suspension_is_not_counted(clock: Page) -> None:
    deadline = time_limit.Deadline(10)
    clock.now += 4
    clock.begin()
    clock.now += 100
    assert 0 < deadline.remaining() <= 0.1
    assert not deadline.passed()
    clock.end(100)
    assert deadline.remaining() == pytest.approx(6)
    clock.now += 5
    assert not deadline.passed()
    clock.now += 2
    assert deadline.passed()


def test_a_suspension_that_nobody_saw_while_it_lasted(clock: Page) -> None:
    deadline = time_limit.Deadline(1)
    clock.now += 3600
    clock.end(3600)  # this process was stopped, too
    assert not deadline.passed()


def test_the_page_of_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, 4096)
    monkeypatch.setenv(world.PAUSE_FD, str(fd))
    assert time_limit._page()[world.PAUSED_AT // 8] == 0
    os.pwrite(fd, (7).to_bytes(8, "little"), world.PAUSED_AT)
    assert time_limit._page()[world.PAUSED_AT // 8] == 0  # an inherited variable: this process has no agent
    monkeypatch.setenv(world.AGENT, str(os.getppid()))
    words = time_limit._page()
    assert words[world.PAUSED_AT // 8] == 7
    os.pwrite(fd, b"\1", 0)
    assert words[0] == 1
    os.close(fd)


def late(seconds: float) -> Callable[[Communicator], float]:
    def fn(comm: Communicator) -> float:
        if comm.rank == 0:
            time.sleep(seconds)
        return float(comm.all_reduce(np.ones(3))[0])

    return fn


def test_a_collective_outlives_its_time_limit_only_in_a_suspension(page: Page) -> None:
    page.begin()
    assert run_threads(late(0.6), 2, timeout=0.2) == [2.0, 2.0]
    page.end(0.6)
    with pytest.raises(CollectiveTimeout, match=r"not complete after 0.2 s"):
        run_threads(late(0.6), 2, timeout=0.2)


def test_waiting_for_work_and_for_a_call_that_blocks(page: Page) -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.4)
        work = comm.all_reduce(np.ones(3), async_op=True)
        work.wait(timeout=0.1)

    page.begin()
    run_threads(fn, 2, timeout=5)
    assert run_within(0.1, lambda: time.sleep(0.3), "blocks") is None
    page.end(0.3)
    with pytest.raises(CollectiveTimeout, match=r"after waiting 0.1 s"):
        run_threads(fn, 2, timeout=5)
    with pytest.raises(StillRunning):
        run_within(0.1, lambda: time.sleep(0.3), "blocks")


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
