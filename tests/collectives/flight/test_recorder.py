"""What is written is what is read: states, wrap-around, texts given up, threads, forks, no shared memory."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.errors import ArgumentError
from collectives.flight import layout
from collectives.flight.layout import FIGURES
from collectives.flight.reader import FlightReader, RecordedCall
from collectives.flight.recorder import DONE, FAILED, QUEUED, Recorder, process_recorder


def begin(recorder: Recorder, number: int, name: str = "all_reduce", on: str = "world", state: int = 2) -> int:
    text = recorder.intern(on, name, "float32", (512, 10), "sum", "/home/me/train.py", 88)
    return recorder.begin(text, number, state)


def calls(recorder: Recorder) -> list[RecordedCall]:
    return FlightReader(recorder.peek).record().calls


def test_a_call_through_its_states() -> None:
    recorder = Recorder(rank=2, size=4)
    times = [time.monotonic_ns()]
    index = begin(recorder, 417, state=QUEUED)
    (queued,) = calls(recorder)
    assert (queued.state, queued.started, queued.ended) == ("queued", 0, 0)
    recorder.start(index)
    (started,) = calls(recorder)
    assert started == queued._replace(state="started", started=started.started)
    recorder.end(index)
    (done,) = calls(recorder)
    assert done == started._replace(state="done", ended=done.ended)
    times += [done.queued, done.started, done.ended, time.monotonic_ns()]
    assert times == sorted(times)
    assert (done.order, done.communicator, done.number, done.site) == (1, "world", 417, "train.py:88")
    assert str(done) == "all_reduce #417 (train.py:88) sum float32 (512, 10)"


def test_the_ring_goes_round_and_texts_are_given_up_and_none_is_ever_wrong() -> None:
    recorder = Recorder()
    reader = FlightReader(recorder.peek)
    for number in range(10_000):
        # Each second call has a new text, 5,000 in all; the others share one, which must not be given up.
        name = f"gather_{number}" if number % 2 else "all_reduce"
        on = "world.1" if number % 3 else "world"
        recorder.end(begin(recorder, number, name, on), DONE if number % 5 else FAILED)
        if number % 500 == 499:
            for call in reader.record().calls:
                assert call.name == (f"gather_{call.number}" if call.number % 2 else "all_reduce")
                assert call.communicator == ("world.1" if call.number % 3 else "world")
                assert call.state == ("done" if call.number % 5 else "failed")
    assert [(call.order, call.number) for call in calls(recorder)] == [(n + 1, n) for n in range(9_000, 10_000)]


def test_texts_of_any_length_and_kind() -> None:
    recorder = Recorder()
    long = "größe" * 50, "f" * 99, tuple(range(999)), "x" * 99, "/ü" * 999 + "/train.py", 2**31
    recorder.begin(recorder.intern("w" * 500, *long), 0)
    recorder.begin(recorder.intern("world", "a\0b", None, None, "", "/home/\udcff/train.py", 7), 1)
    first, second = calls(recorder)
    assert first.communicator == "w" * 93 + "…"
    assert first.site == "train.py:2147483648"
    assert (first.file[0], first.name[:10], first.shape[:9]) == ("…", "größegröße", "(0, 1, 2,")
    assert (second.name, second.dtype, second.file, second.line) == ("a b", "", "/home/?/train.py", 7)


def test_text_that_is_torn_is_not_believed() -> None:
    old, new = (layout.pack_text(number, [f"{number}" * 40, "train.py"], 128) for number in (3, 4))
    assert layout.unpack_text(new, 2) == (4, ["4" * 40, "train.py"])
    for cut in range(1, 56):
        assert layout.unpack_text(new[:cut] + old[cut:], 2) is None
    assert layout.unpack_text(bytes(128), 2) is None
    assert layout.unpack_text(b"", 2) is None


def test_a_call_that_goes_on_a_thousand_calls_late_touches_no_other() -> None:
    recorder = Recorder()
    late = begin(recorder, 0, state=QUEUED)
    for number in range(1, 1_001):
        begin(recorder, number)
    before = calls(recorder)
    recorder.start(late)
    recorder.end(late)
    assert calls(recorder) == before
    assert recorder.times(late) is None
    assert [call.number for call in before] == list(range(1, 1_001))


def test_threads_write_side_by_side() -> None:
    recorder = Recorder()

    def write(thread: int) -> None:
        for number in range(3_000):
            # 4,000 texts: they are given up while others write
            recorder.end(begin(recorder, number, f"from_{thread}_{number % 1_000}", f"world.{thread}"))

    seen = 0
    reader = FlightReader(recorder.peek)
    with ThreadPoolExecutor(4) as threads:
        writing = [threads.submit(write, thread) for thread in range(4)]
        while not (seen and all(each.done() for each in writing)):
            for call in reader.record().calls:
                seen += 1
                assert call.name in (f"from_{call.communicator[6:]}_{call.number % 1_000}", "?")
    # One thread may have lost the GIL between two words, until others had gone round the ring: such a call is missing.
    result = reader.record().calls
    assert 990 <= len(result) <= 1_000
    assert all(11_001 <= call.order <= 12_000 and call.state == "done" for call in result)


def test_a_forked_child_writes_nothing_into_its_parents_record(recorded: Any) -> None:
    job = recorded(
        """
        from collectives.flight.reader import FlightReader
        def show():
            print([call.name for call in FlightReader(recorder.peek).record().calls], recorder.fd, flush=True)
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
    recorder.end(begin(recorder, 5))
    assert [(call.number, call.state) for call in calls(recorder)] == [(5, "done")]


def test_marking_steps() -> None:
    recorder = process_recorder()
    newest = FlightReader(recorder.peek).newest
    samples = newest(0)["samples"]
    collectives.mark_step(7, loss=np.float32(0.5), samples=32)
    collectives.mark_step()
    recorder.count_backwards(4)
    after = newest(0)
    # The program's own count goes before that of backwards.
    assert (after["step"], after["loss"], after["samples"]) == (8, 0.5, samples + 32)  # type: ignore[operator]
    for wrong in (-1, 1.5, "3", 1 << 63):
        with pytest.raises(ArgumentError, match="number of a step"):
            collectives.mark_step(wrong)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="could not convert"):
        collectives.mark_step(loss="low")
    other = Recorder()
    other.count_backwards(3)
    assert FlightReader(other.peek).record().step == 3


def test_figures_of_a_training() -> None:
    recorder = Recorder()
    newest = FlightReader(recorder.peek).newest
    sums = ("samples", "exposed", "waited", "reduced_bytes")
    assert {name: newest(0).get(name) for name in FIGURES} == {
        **dict.fromkeys(sums, 0.0),
        "device_bytes": None,
        "loss": None,
    }
    for name in sums:
        recorder.add(name, 8)
        recorder.add(name, 0.5)
    recorder.set("device_bytes", 4096)
    recorder.set("loss", float("nan"))  # a training that diverges
    result = newest(0)
    assert {name: result[name] for name in sums} == dict.fromkeys(sums, 8.5)
    assert (result["device_bytes"], str(result["loss"])) == (4096, "nan")
