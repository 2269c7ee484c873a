"""Ranks that work side by side for longer than a collective may wait."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from collectives import monitored_section, run_threads
from collectives.communicator import Communicator
from collectives.errors import CollectivesError, CollectiveTimeout
from collectives.monitored_section import MonitoredSection


def test_work_may_take_longer_than_the_time_limit() -> None:
    def main(comm: Communicator) -> float:
        own = comm.duplicate()
        own.timeout = 0.2
        with MonitoredSection(own) as section:
            if comm.rank == 1:
                time.sleep(0.7)
        assert section.failed == ()
        own.barrier()
        return time.monotonic()

    start = time.monotonic()
    assert min(run_threads(main, size=3)) - start >= 0.7


def test_a_rank_whose_script_has_ended_starts_no_thread_and_is_heard_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From Python 3.12 on; the others may be in the middle of theirs."""
    refused = threading.local()
    start = threading.Thread.start

    def begin(self: threading.Thread) -> None:
        if getattr(refused, "here", False):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", begin)
    monkeypatch.setattr(monitored_section, "INTERVAL", 0.05)

    def main(comm: Communicator) -> tuple[int, ...]:
        refused.here = comm.rank > 0
        with contextlib.suppress(KeyError), MonitoredSection(comm) as section:
            time.sleep(0.1 * comm.rank)
            if comm.rank == 2:
                raise KeyError
        comm.barrier()
        return section.failed

    assert run_threads(main, size=3) == [(2,)] * 3


def test_who_failed_is_known_to_all() -> None:
    def main(comm: Communicator) -> tuple[int, ...]:
        fails = comm.rank in (0, 2)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext(), MonitoredSection(comm) as section:
            if fails:
                raise KeyError
        comm.barrier()  # the communicator is as good as before
        return section.failed

    assert run_threads(main, size=3) == [(0, 2)] * 3


def test_a_rank_that_gets_nowhere_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_section, "INTERVAL", 0.02)

    def main(comm: Communicator) -> None:
        def work() -> None:
            with MonitoredSection(comm, 0.2):
                time.sleep(0.6 * (comm.rank > 0))

        stuck = "rank 1 has" if comm.size == 2 else "ranks 1-2 have"
        with pytest.raises(CollectiveTimeout, match=rf"{stuck} made no progress for 0\.2 s, though still alive"):
            work()

    for size in (2, 3):
        run_threads(main, size=size)


def test_progress_is_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_section, "INTERVAL", 0.02)

    def main(comm: Communicator) -> None:
        with MonitoredSection(comm, 2.0) as section:
            for _ in range(24 if comm.rank == 1 else 0):
                time.sleep(0.1)
                section.progress()

    run_threads(main, size=2)


def test_a_rank_that_has_left_ends_the_wait() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            return
        with pytest.raises(CollectivesError, match="rank 1 has left"), MonitoredSection(comm):
            pass

    run_threads(main, size=2)
