"""Reading from another process: while it writes at full speed, is stopped, holds the GIL, or has died; and refusals."""

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

import collectives
from collectives.errors import ArgumentError, RecordError
from collectives.flight import layout
from collectives.flight.reader import FlightReader
from collectives.flight.recorder import DONE, FAILED, STARTED, Recorder, process_recorder
from collectives.flight.report import FlightRecord, read


def read_fd(pid: int, fd: int) -> FlightRecord:
    """What process `pid`, which has its record open as `fd`, has done so far."""
    with FlightReader.of_fd(pid, fd) as reader:
        return read(reader)


# Everything that a call says follows from its number, so that a torn one would show.
FULL_SPEED = """
names = [f"call_{n}" for n in range(5)]
def texts(number, kinds):
    return names[number % 5], "f%d" % (number % kinds), (number % kinds, 7), "sum", "/home/me/train.py", number % kinds
communicators = [recorder.communicator(f"world.{n}") for n in range(3)]
ready()
number = 0
while True:
    index = recorder.begin(communicators[number % 3], number, recorder.intern(*texts(number, {kinds})))
    recorder.end(index, DONE if number % 7 else FAILED)
    number += 1
"""


@pytest.mark.parametrize("kinds", [1, 40, 100_000])
def test_no_torn_call_is_believed_while_the_process_writes_at_full_speed(
    recorded: Any, kinds: int, count: Callable[[int, int], int]
) -> None:
    job = recorded(FULL_SPEED.replace("{kinds}", str(kinds)))
    seen, newest = 0, 0
    end = time.monotonic() + 0.1 * count(4, 200)
    with FlightReader.of(job.process.pid) as reader:
        while time.monotonic() < end or min(seen, newest) <= 10_000:
            calls = read(reader).calls
            orders = [call.order for call in calls]
            assert orders == sorted(set(orders))
            assert not calls or calls[-1].order >= newest
            assert all(call.order > orders[-1] - 1_000 for call in calls)
            for call in calls:
                number = call.number
                assert call.order == number + 1
                assert call.communicator == f"world.{number % 3}"
                assert (call.name, call.dtype) == (f"call_{number % 5}", f"f{number % kinds}")
                assert (call.shape, call.line) == (f"({number % kinds}, 7)", number % kinds)
                assert call.queued == call.started
                assert call.state in ("started", "done" if number % 7 else "failed")
                assert (call.ended == 0) == (call.state == "started")
                assert call.ended == 0 or 0 <= call.ended - call.started < 10e9
            seen += len(calls)
            newest = orders[-1] if calls else newest
    os.kill(job.process.pid, signal.SIGSTOP)  # wherever it is: at most the call being written is missing
    _await_state(job.process.pid, "T")
    record = read(job.process.pid)
    assert len(record.calls) >= 999
    assert record.calls[-1].order - record.calls[0].order <= 999


def _await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("word", [0, 7])
def test_a_call_whose_two_ends_disagree_is_not_believed(word: int) -> None:
    recorder = Recorder()
    world = recorder.communicator("world")
    for number in range(3):
        recorder.begin(world, number, recorder.intern("barrier", "", (), "", "train.py", 88))
    data = bytearray(recorder.peek(0, layout.SIZE))
    second = layout.CALLS_AT + 2 * layout.CALL_SIZE
    data[second + 8 * word : second + 8 * word + 8] = struct.pack("q", 1002 if word == 0 else 1002 << 3 | 3)
    calls = read(FlightReader(lambda offset, length: bytes(data[offset : offset + length]))).calls
    assert [call.number for call in calls] == [0, 2]


def test_a_stopped_process(recorded: Any) -> None:
    job = recorded("index = call(); ready(); time.sleep(60)")
    os.kill(job.process.pid, signal.SIGSTOP)
    _await_state(job.process.pid, "T")
    record = read(job.process.pid)
    assert (record.pid, record.rank, record.size) == (job.process.pid, 1, 4)
    assert [(str(call), call.state) for call in record.calls] == [
        ("all_reduce #417 (train.py:88) sum float32 (512, 10)", "started")
    ]


def test_what_a_dead_process_did_last(recorded: Any) -> None:
    job = recorded("recorder.end(call('gather'), FAILED); call(); ready(); time.sleep(60)")
    with FlightReader.of(job.process.pid) as reader:
        job.process.kill()
        job.process.wait()
        assert [(call.name, call.state) for call in read(reader).calls] == [
            ("gather", "failed"),
            ("all_reduce", "started"),
        ]
        assert read(reader) == read(reader)
    with pytest.raises(RecordError, match=f"there is no process {job.process.pid}"):
        read(job.process.pid)


def _file(content: bytes, name: str = "other") -> int:
    fd = os.memfd_create(name)
    os.write(fd, content)
    return fd


def _forged(**changes: Any) -> bytes:
    """A whole record with another header."""
    header = {"magic": layout.MAGIC, "version": layout.VERSION, "size": layout.SIZE, **changes}
    return layout.HEADER.pack(*header.values(), os.getpid(), 0, 1, 0, -1, -1).ljust(layout.SIZE, b"\0")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this is not a flight record, or it is only being made"),
        (b"\x7fELF" * 100_000, "this is not a flight record"),
        (_forged(magic=b"ddpfligX"), "this is not a flight record"),
        (_forged(version=1), "a flight record of layout 1, but this reader knows layout 2"),
        (_forged(size=4096), "a damaged flight record"),
        (_forged()[:4096], "a damaged flight record"),
    ],
)
def test_what_is_no_flight_record_is_refused(content: bytes, words: str) -> None:
    fd = _file(content)
    try:
        with pytest.raises(RecordError, match=f"process {os.getpid()}, file descriptor {fd}: {words}"):
            read_fd(os.getpid(), fd)
    finally:
        os.close(fd)


def test_a_record_that_shrinks_under_its_reader_is_an_error() -> None:
    fd = _file(_forged())
    try:
        with FlightReader.of_fd(os.getpid(), fd) as reader:
            assert read(reader).calls == []
            os.ftruncate(fd, 4096)
            with pytest.raises(RecordError, match="damaged"):
                read(reader)
    finally:
        os.close(fd)


def test_a_process_without_a_record() -> None:
    with pytest.raises(RecordError, match="there is no process 4194305"):
        read(4_194_305)
    with pytest.raises(RecordError, match=f"process {os.getpid()} has no file descriptor 9999"):
        read_fd(os.getpid(), 9999)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        with pytest.raises(RecordError, match=rf"process {process.pid} \(.*keeps no flight record: it is no rank"):
            read(process.pid)
        process.communicate(b"\n", timeout=20)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        _await_state(ended.pid, "Z")
        with pytest.raises(RecordError, match=f"process {ended.pid} has ended"):
            read(ended.pid)
    finally:
        ended.wait(timeout=20)


def test_a_forked_child_has_not_its_parents_record(recorded: Any) -> None:
    job = recorded(
        """
        call()
        child = os.fork()
        if child == 0:
            time.sleep(60)
        ready()
        print(child, flush=True)
        time.sleep(60)
        """
    )
    child = int(job.process.stdout.readline())
    words = f"process {child} keeps no flight record of its own; process {job.process.pid} does, its parent"
    with pytest.raises(RecordError, match=words):
        read(child)


def test_a_process_of_another_user(run_job: Any) -> None:
    code = (
        "import os\n"
        "from collectives.errors import RecordError\n"
        "from collectives.flight.report import read\n"
        "pid = os.getppid() if os.geteuid() == 0 else 1\n"
        "if os.geteuid() == 0:\n"  # then somebody else looks at us
        "    os.setgroups([]); os.setgid(65_534); os.setuid(65_534)\n"
        "try:\n"
        "    read(pid)\n"
        "except RecordError as error:\n"
        "    print(pid, error)\n"
    )
    words = run_job([sys.executable, "-c", code], timeout=20).stdout.strip()
    pid = words.split()[0]
    assert words == f"{pid} process {pid} may not be looked into: it belongs to another user"


def test_a_reader_costs_an_agent_little() -> None:
    code = (
        "import sys, collectives.flight.reader\n"
        "ours = {name for name in sys.modules if name.startswith(('collectives.', 'ddp', 'launcher'))}\n"
        "flight = {f'collectives.flight.{each}' for each in ('layout', 'reader')}\n"
        "assert ours == flight | {'collectives.flight', 'collectives.errors'}, ours\n"
        "assert not {'numpy', 'mpi4py', 'dataclasses', 'threading', 'json', 'typing'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=60)


# The newest call alone, which an agent reads every second -------------------------------------------------------------


def enter(recorder: Recorder, number: int, state: int, name: str = "all_reduce") -> int:
    signature = recorder.intern(name, "float32", (512, 10), "sum", "/home/me/train.py", 88)
    return recorder.begin(recorder.communicator("world"), number, signature, state)


def newest(recorder: Recorder, later: float = 0.0) -> dict[str, object]:
    return FlightReader(recorder.peek).newest(time.monotonic_ns() + round(later * 1e9))


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
