"""Reading from another process: while it writes at full speed, is stopped, or has died; refusals."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectives.errors import RecordError
from collectives.flight import layout, reader
from collectives.flight.reader import FlightReader, read
from collectives.flight.recorder import Recorder
from tests.conftest import wait_until

# Everything that a call says follows from its number, so that a torn one would show.
FULL_SPEED = """
names = [f"call_{n}" for n in range(5)]
def texts(number, kinds):
    kind = number % kinds
    return f"world.{number % 3}", names[number % 5], f"f{kind}", (kind, 7), "sum", "/home/me/train.py", kind
ready()
number = 0
while True:
    recorder.end(recorder.begin(recorder.intern(*texts(number, {kinds})), number), DONE if number % 7 else FAILED)
    number += 1
"""


@pytest.mark.parametrize("kinds", [pytest.param(1, marks=pytest.mark.long), 100_000], ids=["one text", "new texts"])
def test_no_torn_call_is_believed_while_the_process_writes_at_full_speed(
    recorded: Any, kinds: int, count: Callable[[int, int], int]
) -> None:
    job = recorded(FULL_SPEED.replace("{kinds}", str(kinds)))
    seen, newest = 0, 0
    end = time.monotonic() + 0.1 * count(4, 200)
    with FlightReader.of(job.process.pid) as reader:
        while time.monotonic() < end or min(seen, newest) <= 10_000:
            calls = reader.record().calls
            orders = [call.order for call in calls]
            assert orders == sorted(set(orders))
            for call in calls:
                number = call.number
                kind = call.number % kinds
                assert (call.order, call.communicator) == (number + 1, f"world.{number % 3}")
                assert (call.name, call.dtype) == (f"call_{number % 5}", f"f{kind}")
                assert (call.shape, call.line) == (f"({kind}, 7)", kind)
                assert call.queued == call.started
                assert call.state in ("started", "done" if number % 7 else "failed")
                assert (call.ended == 0) == (call.state == "started")
            seen += len(calls)
            # The newest are missing where the reader lost its core between its two looks, and the ring went on.
            assert not calls or orders[-1] > newest - layout.CALLS
            newest = orders[-1] if calls else newest


def _await_state(pid: int, state: str) -> None:
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == state)


@pytest.mark.parametrize("word", [0, 6])
def test_a_call_whose_two_ends_disagree_is_not_believed(word: int) -> None:
    recorder = Recorder()
    for number in range(3):
        recorder.begin(recorder.intern("world", "barrier", None, None, "", "train.py", 88), number)
    data = bytearray(recorder.peek(0, layout.SIZE))
    second = layout.CALLS_AT + 2 * layout.CALL.size + 8 * word
    data[second : second + 8] = struct.pack("q", 1002 if word == 0 else 1002 << 3 | 3)
    record = FlightReader(lambda offset, length: bytes(data[offset : offset + length])).record()
    assert [call.number for call in record.calls] == [0, 2]


def test_a_stopped_process_and_what_a_dead_one_did_last(recorded: Any) -> None:
    job = recorded("recorder.end(call('gather'), FAILED); call(); ready(); time.sleep(60)")
    pid = job.process.pid
    job.process.send_signal(signal.SIGSTOP)
    _await_state(pid, "T")
    with FlightReader.of(pid) as reader:
        record = reader.record()
        job.process.kill()
        job.process.wait()
        assert reader.record() == record
    assert (record.pid, record.rank, record.size) == (pid, 1, 4)
    assert [(call.name, call.state) for call in record.calls] == [("gather", "failed"), ("all_reduce", "started")]
    with pytest.raises(RecordError, match=f"there is no process {pid}"):
        read(pid)


def _forged(**changes: Any) -> bytes:
    """A whole record with another header."""
    header = {"magic": layout.MAGIC, "version": layout.VERSION, "size": layout.SIZE, **changes}
    return layout.HEADER.pack(*header.values(), os.getpid(), 0, 1, -1, -1, *[0.0] * 6).ljust(layout.SIZE, b"\0")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this is not a flight record, or it is only being made"),
        (_forged(magic=b"ddpfligX"), "this is not a flight record"),
        (_forged(version=1), f"a flight record of layout 1, but this reader knows layout {layout.VERSION}"),
        (_forged(size=4096), "a damaged flight record"),
        (_forged()[:4096], "a damaged flight record"),
    ],
)
def test_what_is_no_flight_record_is_refused(content: bytes, words: str) -> None:
    fd = os.memfd_create("other")
    os.write(fd, content)
    try:
        with pytest.raises(RecordError, match=f"process {os.getpid()}, file descriptor {fd}: {words}"):
            FlightReader.of_fd(os.getpid(), fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, _forged(), 0)
        with FlightReader.of_fd(os.getpid(), fd) as reader:
            assert reader.record().calls == []
            os.ftruncate(fd, 4096)  # it shrinks under its reader
            with pytest.raises(RecordError, match="damaged"):
                reader.record()
    finally:
        os.close(fd)


def test_a_process_without_a_record(recorded: Any) -> None:
    with pytest.raises(RecordError, match="there is no process 4194305"):
        read(4_194_305)
    job = recorded("child = os.fork() or time.sleep(60); ready(); print(child, flush=True); time.sleep(60)")
    child = int(job.process.stdout.readline())
    with pytest.raises(RecordError, match=f"process {child} keeps no flight record: it is no rank"):
        read(child)  # its parent's is none of its own
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        _await_state(ended.pid, "Z")
        with pytest.raises(RecordError, match=f"process {ended.pid} has ended"):
            read(ended.pid)
    finally:
        ended.wait(timeout=20)


def test_a_record_closed_between_the_look_and_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a forked child closes that of its parent."""
    inherited = os.memfd_create(layout.NAME)
    is_record = reader._is_record
    closed = []

    def close_then(pid: int, fd: int) -> bool:
        result = is_record(pid, fd)
        if fd == inherited and not closed:
            os.close(fd)
            closed.append(fd)
        return result

    monkeypatch.setattr(reader, "_is_record", close_then)
    own = Recorder()
    assert read(os.getpid()).pid == os.getpid()
    assert closed
    del own


def test_the_newest_call_as_a_message() -> None:
    recorder = Recorder()
    for number in range(1_500):  # once around the ring
        text = recorder.intern("world", "all_reduce", "float32", (512, 10), "sum", "/home/me/train.py", 88)
        recorder.end(recorder.begin(text, number))
    assert FlightReader(Recorder().peek).newest(0) == {
        **dict.fromkeys(("step", "call", "call_on", "call_state", "call_age", "where", "where_age")),
        "calls": 0,
        **dict.fromkeys(("samples", "exposed", "waited", "reduced_bytes"), 0.0),
    }
    result = FlightReader(recorder.peek).newest(time.monotonic_ns() + 31_200_000_000)
    assert result["calls"] == 1_500
    assert result["call"] == "all_reduce #1499 (train.py:88) sum float32 (512, 10)"
    assert (result["call_on"], result["call_state"]) == ("world", "done")
    assert result["call_age"] == pytest.approx(31.2, abs=0.5)
