"""Reading from another process: while it writes at full speed, is stopped, or has died; refusals; a record in words."""

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
from collectives.flight import reader as layout
from collectives.flight.reader import FlightReader, FlightRecord, Position, RecordedCall, describe_last, read, table
from collectives.flight.recorder import Recorder

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


@pytest.mark.parametrize("kinds", [1, 100_000])
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
                number, kind = call.number, call.number % kinds
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
    os.kill(job.process.pid, signal.SIGSTOP)  # wherever it is: at most the call being written is missing
    _await_state(job.process.pid, "T")
    assert len(read(job.process.pid).calls) >= 999


def _await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    return layout.HEADER.pack(*header.values(), os.getpid(), 0, 1, -1, -1).ljust(layout.SIZE, b"\0")


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


# In words -------------------------------------------------------------------------------------------------------------

NOW = 100_000_000_000  # ns
HERE = Position(99_600_000_000, "/home/me/data.py", 31, "load", None)


def call(order: int, state: str = "done", queued: float = 60.0, took: float = 8.8, **more: object) -> RecordedCall:
    """A call that was queued at `queued` s, started 1 ms later and, if it has ended, took `took` s."""
    at = int(queued * 1e9)
    started = at + 1_000_000 if state != "queued" else 0
    ended = started + int(took * 1e9) if state in ("done", "failed") else 0
    texts = ("all_reduce", "float32", "(512, 10)", "sum", "/home/me/train.py", 88)
    return RecordedCall(order, "world", 416 + order, state, at, started, ended, *texts)._replace(**more)


def record(*calls: RecordedCall, rank: int = 0, position: Position | None = None) -> FlightRecord:
    return FlightRecord(4711 + rank, rank, 4, list(calls), position)


ALL_REDUCE = "last call all_reduce #417 (train.py:88) sum float32 (512, 10)"
STOOD = "its Python stood at data.py:31 in load"


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (record(), "no call yet"),
        (record(call(1), position=HERE), f"{ALL_REDUCE}, done 31.2 s ago; {STOOD} (0.4 s before)"),
        (record(call(1, "queued")), f"{ALL_REDUCE}, queued for 40.0 s"),
        (
            record(call(1, "started", communicator="world.1 (DataParallel of Net)")),
            f"{ALL_REDUCE} on world.1 (DataParallel of Net), under way for 40.0 s",
        ),
        (record(call(1, "failed"))._replace(step=7), f"{ALL_REDUCE}, failed 31.2 s ago; step 7"),
        (  # of queued calls, the one that they wait for
            record(call(1, "started"), call(2, "queued"), call(3, "queued")),
            f"{ALL_REDUCE}, under way for 40.0 s, 2 more queued",
        ),
        (
            record(position=HERE._replace(within=("/usr/lib/python3/threading.py", 327, "wait"))),
            f"no call yet; {STOOD}, within threading.py:327 in wait (0.4 s before)",
        ),
        (
            record(call(1, name="barrier", more="", dtype="", shape="")),
            "last call barrier #417 (train.py:88), done 31.2 s ago",
        ),
        (record(position=HERE._replace(time=NOW + 5)), f"no call yet; {STOOD} (0.0 s before)"),
    ],
)
def test_what_a_rank_did_last(known: FlightRecord, text: str) -> None:
    assert describe_last(known, NOW) == text


def test_a_table_of_several_ranks() -> None:
    one = record(call(1), call(2, took=0.009), call(3, "started", name="gather", more="root=1"), rank=1, position=HERE)
    none, two = record(call(9, "failed", 61, took=9e-3), rank=-1), record(rank=2)
    assert table([two, one, none], NOW, last=2).splitlines() == [
        "rank  pid   call                     dtype    shape      where        communicator  state    begun       took",
        "?     4710  all_reduce #425  sum     float32  (512, 10)  train.py:88  world         failed   39.0 s ago  9 ms",
        "1     4712  all_reduce #418  sum     float32  (512, 10)  train.py:88  world         done     40.0 s ago  9 ms",
        "1     4712  gather #419      root=1  float32  (512, 10)  train.py:88  world         started  40.0 s ago",
        "",
        f"rank ? (pid 4710): {describe_last(none, NOW)}",
        f"rank 1 (pid 4712): {describe_last(one, NOW)}",
        "rank 2 (pid 4713): no call yet",
    ]
    assert table([record()], NOW) == "rank 0 (pid 4711): no call yet"


def test_the_newest_call_as_a_message() -> None:
    recorder = Recorder()
    for number in range(1_500):  # once around the ring
        signature = recorder.intern("world", "all_reduce", "float32", (512, 10), "sum", "/home/me/train.py", 88)
        recorder.end(recorder.begin(signature, number))
    assert FlightReader(Recorder().peek).newest(0) == {
        **dict.fromkeys(("step", "call", "call_on", "call_state", "call_age", "where", "where_age")),
        "calls": 0,
    }
    found = FlightReader(recorder.peek).newest(time.monotonic_ns() + 31_200_000_000)
    assert found["calls"] == 1_500
    assert found["call"] == "all_reduce #1499 (train.py:88) sum float32 (512, 10)"
    assert (found["call_on"], found["call_state"]) == ("world", "done")
    assert found["call_age"] == pytest.approx(31.2, abs=0.5)
