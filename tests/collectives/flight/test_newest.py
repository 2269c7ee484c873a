"""The newest call alone, and the step: what an agent reads every second."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import collectives
from collectives.errors import ArgumentError, RecordError
from collectives.flight.reader import FlightReader
from collectives.flight.recorder import DONE, FAILED, QUEUED, STARTED, Recorder, process_recorder

NOTHING = {
    "step": None,
    "calls": 0,
    "call": None,
    "call_on": None,
    "call_state": None,
    "call_age": None,
    "where": None,
    "where_age": None,
}


def enter(recorder: Recorder, number: int, state: int, name: str = "all_reduce") -> int:
    signature = recorder.intern(name, "float32", (512, 10), "sum", "/home/me/train.py", 88)
    return recorder.begin(recorder.communicator("world"), number, signature, state)


def newest(recorder: Recorder, later: float = 0.0) -> dict[str, object]:
    return FlightReader(recorder.peek).newest(time.monotonic_ns() + round(later * 1e9))


def test_a_new_record_says_nothing() -> None:
    assert newest(Recorder()) == NOTHING


@pytest.mark.parametrize(("state", "word"), [(DONE, "done"), (FAILED, "failed")])
def test_the_newest_call_and_how_long_ago_it_ended(state: int, word: str) -> None:
    recorder = Recorder()
    for number in range(1_500):  # once around the ring
        recorder.end(enter(recorder, number, STARTED), state)
    found = newest(recorder, later=31.2)
    assert found["calls"] == 1_500
    assert found["call"] == "all_reduce #1499 (train.py:88) sum float32 (512, 10)"
    assert (found["call_on"], found["call_state"]) == ("world", word)
    assert found["call_age"] == pytest.approx(31.2, abs=0.5)


def test_a_queued_call_gives_way_to_the_one_for_which_it_waits() -> None:
    recorder = Recorder()
    enter(recorder, 0, STARTED, "gather")
    enter(recorder, 1, QUEUED)
    found = newest(recorder)
    assert (found["calls"], found["call_state"]) == (2, "started")
    assert str(found["call"]).startswith("gather #0")


def test_queued_calls_alone() -> None:
    recorder = Recorder()
    enter(recorder, 0, QUEUED)
    found = newest(recorder, later=2)
    assert (found["call_state"], found["call_age"]) == ("queued", pytest.approx(2, abs=0.5))


def test_the_position_has_an_age() -> None:
    recorder = Recorder()
    recorder.record_position(("/home/me/data.py", 31, "load"), ("/lib/x.py", 5, "read"))
    found = newest(recorder, later=7)
    assert (found["where"], found["where_age"]) == ("data.py:31 in load", pytest.approx(7, abs=0.5))


def test_the_programs_own_count_goes_before_that_of_backwards() -> None:
    recorder = Recorder()
    recorder.count_backwards(3)
    assert newest(recorder)["step"] == 3
    recorder.step(10_000)
    recorder.count_backwards(4)
    assert newest(recorder)["step"] == 10_000
    recorder.step()
    assert newest(recorder)["step"] == 10_001
    recorder.step(0)
    assert newest(recorder)["step"] == 0


def test_marking_steps() -> None:
    record = FlightReader(process_recorder().peek)
    collectives.mark_step()
    first = record.header()[4]
    assert first is not None
    assert first >= 1
    collectives.mark_step()
    assert record.header()[4] == first + 1
    collectives.mark_step(7)
    assert record.header()[4] == 7


@pytest.mark.parametrize("n", [-1, 1.5, "3", 1 << 63])
def test_a_step_is_a_whole_number(n: Any) -> None:
    with pytest.raises(ArgumentError, match="number of a step"):
        collectives.mark_step(n)


@pytest.mark.timeout(60)
def test_no_torn_call_is_believed() -> None:
    recorder = Recorder()
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            signature = recorder.intern(f"call_{number % 5}", None, None, "", "t.py", number % 5)
            recorder.end(recorder.begin(recorder.communicator(f"c{number % 3}"), number, signature))
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        believed = 0
        while believed < 300:
            found = newest(recorder)
            if found["call"] is not None:
                number = int(str(found["call"]).split("#")[1].split()[0])
                assert found["call"] == f"call_{number % 5} #{number} (t.py:{number % 5})"
                assert found["call_on"] == f"c{number % 3}"
                believed += 1
    finally:
        over.set()
        writer.join()


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(RecordError, match="not a flight record"):
        FlightReader(lambda offset, length: bytes(length)).newest(0)
