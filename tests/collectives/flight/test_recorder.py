"""What is written is what is read: states, wrap-around, signatures given up, threads, forks, no shared memory."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest

from collectives.flight.reader import FlightReader
from collectives.flight.recorder import DONE, FAILED, QUEUED, Recorder
from collectives.flight.report import RecordedCall, read


def signature(recorder: Recorder, name: str = "all_reduce") -> int:
    return recorder.intern(name, "float32", (512, 10), "sum", "/home/me/train.py", 88)


def calls(recorder: Recorder) -> list[RecordedCall]:
    return read(FlightReader(recorder.peek)).calls


def test_a_call_through_its_states() -> None:
    recorder = Recorder(rank=2, size=4)
    before = time.monotonic_ns()
    index = recorder.begin(recorder.communicator("world"), 417, signature(recorder), QUEUED)
    (queued,) = calls(recorder)
    assert (queued.state, queued.started, queued.ended) == ("queued", 0, 0)
    assert before <= queued.queued <= time.monotonic_ns()
    recorder.start(index)
    (started,) = calls(recorder)
    assert (started.state, started.queued, started.ended) == ("started", queued.queued, 0)
    recorder.end(index)
    (done,) = calls(recorder)
    assert done.state == "done"
    assert done.queued <= started.started == done.started <= done.ended <= time.monotonic_ns()
    assert done == started._replace(state="done", ended=done.ended)
    assert (done.order, done.communicator, done.number) == (1, "world", 417)
    assert (done.name, done.dtype, done.shape, done.more) == ("all_reduce", "float32", "(512, 10)", "sum")
    assert (done.file, done.line, done.site) == ("/home/me/train.py", 88, "train.py:88")


def test_the_ring_goes_round_and_signatures_are_given_up_and_none_is_ever_wrong() -> None:
    recorder = Recorder()
    world, other = recorder.communicator("world"), recorder.communicator("world.1")
    reader = FlightReader(recorder.peek)
    for number in range(10_000):
        # Each second call has a new signature, 5,000 in all; the others share one, which must not be given up.
        name = f"gather_{number}" if number % 2 else "all_reduce"
        index = recorder.begin(other if number % 3 else world, number, signature(recorder, name))
        recorder.end(index, DONE if number % 5 else FAILED)
        if number % 500 == 499:
            for call in read(reader).calls:
                assert call.name == (f"gather_{call.number}" if call.number % 2 else "all_reduce")
    record = read(reader)
    assert [call.order for call in record.calls] == list(range(9_001, 10_001))
    for call in record.calls:
        assert call.number == call.order - 1
        assert call.name == (f"gather_{call.number}" if call.number % 2 else "all_reduce")
        assert call.communicator == ("world.1" if call.number % 3 else "world")
        assert call.state == ("done" if call.number % 5 else "failed")
    assert record.calls == read(FlightReader(recorder.peek)).calls


def test_texts_of_any_length_and_kind() -> None:
    recorder = Recorder()
    world = recorder.communicator("w" * 500)
    long = recorder.intern("größe" * 50, "f" * 99, tuple(range(999)), "x" * 99, "/ü" * 999 + "/train.py", 2**31)
    odd = recorder.intern("a\0b", "", (), "", "/home/\udcff/train.py", 7)
    recorder.begin(world, 0, long)
    recorder.begin(world, 1, odd)
    first, second = calls(recorder)
    assert first.communicator == "w" * 109 + "…"
    assert first.site == "train.py:2147483648"
    assert first.file.startswith("…")
    assert first.name.startswith("größegröße")
    assert first.shape.startswith("(0, 1, 2, ")
    assert (second.name, second.file, second.line) == ("a b", "/home/?/train.py", 7)


def test_a_call_that_goes_on_a_thousand_calls_late_touches_no_other() -> None:
    recorder = Recorder()
    world, called = recorder.communicator("world"), signature(recorder)
    late = recorder.begin(world, 0, called, QUEUED)
    for number in range(1, 1_001):
        recorder.begin(world, number, called)
    before = calls(recorder)
    recorder.start(late)
    recorder.end(late)
    assert calls(recorder) == before
    assert [call.number for call in before] == list(range(1, 1_001))


def test_threads_write_side_by_side() -> None:
    recorder = Recorder()

    def write(thread: int) -> None:
        mine = recorder.communicator(f"world.{thread}")
        for number in range(3_000):
            name = f"from_{thread}_{number % 1_000}"  # 4,000 signatures: they are given up while others write
            recorder.end(recorder.begin(mine, number, signature(recorder, name)))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    seen = 0
    reader = FlightReader(recorder.peek)
    while any(thread.is_alive() for thread in threads) or not seen:
        for call in read(reader).calls:
            seen += 1
            # One that was given up between `intern` and `begin`, by another thread, is unknown but never wrong.
            assert call.name in (f"from_{call.communicator[6:]}_{call.number % 1_000}", "?")
    for thread in threads:
        thread.join()
    record = read(reader)
    # One thread may have lost the GIL between two words, until others had gone round the ring: such a call is missing.
    assert 990 <= len(record.calls) <= 1_000
    assert {call.state for call in record.calls} == {"done"}
    assert all(11_001 <= call.order <= 12_000 for call in record.calls)


def test_a_forked_child_writes_nothing_into_its_parents_record(recorded: Any) -> None:
    job = recorded(
        """
        from collectives.flight.reader import FlightReader
        from collectives.flight.report import read
        def show():
            print([call.name for call in read(FlightReader(recorder.peek)).calls], recorder.fd, flush=True)
        ready()
        call("before")
        child = os.fork()
        if child == 0:
            call("in_child")
            show()
            os._exit(0)
        os.waitpid(child, 0)
        call("after")
        recorder.fd = "shared"
        show()
        """
    )
    assert job.wait(20).stdout == "['before', 'in_child'] None\n['before', 'after'] shared\n"


def test_without_shared_memory_the_process_itself_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    recorder = Recorder()
    assert recorder.fd is None
    recorder.end(recorder.begin(recorder.communicator("world"), 5, signature(recorder)))
    assert [(call.number, call.state) for call in calls(recorder)] == [(5, "done")]
