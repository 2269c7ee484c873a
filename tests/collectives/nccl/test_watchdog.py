"""The watchdog: over the stub with real ranks, and alone with events that complete when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from collectives._nccl.watchdog import Watchdog
from collectives.errors import CollectiveTimeout, NcclError
from tests.collectives.nccl.conftest import Crew


class FakeEvent:
    def __init__(self, done: bool = False) -> None:
        self.done = done


class BrokenEvent:
    @property
    def done(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


class FakeCommunicator:
    rank = 3

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.error: Exception | None = None

    def async_error(self) -> Exception | None:
        return self.error

    def abort(self, reason: BaseException | None = None, timeout: float = 10.0) -> bool:
        self.steps.append(f"abort because of {type(reason).__name__}")
        return True


def no_record() -> None:
    raise OSError("the disk is full")


def soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def watchdog(steps: list[str], **options: object) -> tuple[Watchdog, FakeCommunicator]:
    communicator = FakeCommunicator(steps)
    settings: dict[str, object] = {
        "record": lambda: steps.append("record"),
        "on_failure": lambda error: steps.append(f"broken by {type(error).__name__}"),
        "leave": lambda status: steps.append(f"exit {status}"),
        "silence": 20.0,
    }
    return Watchdog(communicator, **{**settings, **options}), communicator  # type: ignore[arg-type]


class BreaksWhenClosed:
    """A device that fails while the watchdog asks it, which is closed before it has the answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.closed = threading.Event()

    @property
    def done(self) -> bool:
        self.asked.set()
        self.closed.wait(10)
        raise RuntimeError("an illegal memory access was encountered")


LATE = ["record", "broken by CollectiveTimeout", "abort because of CollectiveTimeout"]


def test_what_is_complete_in_time_is_forgotten() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    first, second = FakeEvent(), FakeEvent()
    dog.watch(first, "first", time.monotonic() + 20)
    dog.watch(second, "second", time.monotonic() + 20)
    first.done = True
    time.sleep(0.05)
    assert not dog.idle()
    second.done = True
    soon(dog.idle)
    dog.check()
    assert dog.close()
    assert steps == []


def test_a_failure_behind_the_end_is_nobodys_concern() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    event = BreaksWhenClosed()
    dog.watch(event, "last", time.monotonic() + 20)
    assert event.asked.wait(10)
    assert not dog.close(0)  # it asks still
    event.closed.set()
    assert dog.close()
    assert steps == []


def test_what_is_late_is_recorded_broken_and_aborted_in_this_order() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    dog.watch(FakeEvent(), "long one", time.monotonic() + 20)
    dog.watch(FakeEvent(), "all_gather #8 (train.py:9)", time.monotonic() + 0.05)
    soon(lambda: len(steps) >= 3)
    with pytest.raises(CollectiveTimeout, match=r"rank 3: all_gather #8 \(train.py:9\) was not complete on the device"):
        dog.check()
    with pytest.raises(CollectiveTimeout, match="#8"):  # for ever
        dog.watch(FakeEvent(), "another", time.monotonic() + 20)
    assert dog.close()
    assert steps == LATE


def test_what_is_complete_behind_something_unfinished_is_not_late() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    first = FakeEvent()
    dog.watch(first, "first", time.monotonic() + 20)
    dog.watch(FakeEvent(done=True), "second, on another stream", time.monotonic() + 0.02)
    time.sleep(0.1)
    first.done = True
    soon(dog.idle)
    assert dog.close()
    assert steps == []


def test_an_asynchronous_error_counts_even_when_nothing_is_watched() -> None:
    steps: list[str] = []
    dog, communicator = watchdog(steps)
    communicator.error = NcclError("the network is down")
    soon(lambda: len(steps) >= 3)
    with pytest.raises(NcclError, match="the network is down"):
        dog.check()
    assert dog.close()
    assert steps == ["record", "broken by NcclError", "abort because of NcclError"]


def test_an_event_that_cannot_be_asked_is_a_failure() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    dog.watch(BrokenEvent(), "all_reduce #1", time.monotonic() + 20)
    soon(lambda: len(steps) >= 3)
    with pytest.raises(NcclError, match="rank 3: watching its operations failed: RuntimeError: an illegal"):
        dog.check()
    assert dog.close()


def test_a_failure_that_somebody_else_found() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    dog.fail(ValueError("in the issuing thread"))
    dog.fail(NcclError("a second one does not count"))
    soon(lambda: len(steps) >= 3)
    with pytest.raises(NcclError, match="ValueError: in the issuing thread"):
        dog.check()
    assert isinstance(dog.failure, ValueError)
    assert dog.close()


def test_a_record_that_cannot_be_written_does_not_keep_the_communicator_alive(
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps, record=no_record)
    dog.watch(FakeEvent(), "late", time.monotonic())
    soon(lambda: len(steps) >= 2)
    dog.heard()
    assert dog.close()
    assert steps == LATE[1:]
    assert "the disk is full" in capfd.readouterr().err


def test_a_record_that_hangs_does_not_keep_the_communicator_alive(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    disk = threading.Event()
    dog, _ = watchdog(steps, record=disk.wait, silence=0.2)
    dog.heard()
    dog.watch(FakeEvent(), "late", time.monotonic())
    soon(lambda: len(steps) >= 2)
    disk.set()
    assert dog.close()
    assert steps == LATE[1:]
    assert "nccl-flight-record" in capfd.readouterr().err


def test_a_program_that_does_not_hear_of_it_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    watchdog(steps, silence=0.2)[0].watch(FakeEvent(), "all_reduce #5 (train.py:7)", time.monotonic())
    soon(lambda: "exit 1" in steps)
    assert steps == [*LATE, "exit 1"]
    error = capfd.readouterr().err
    assert "CollectiveTimeout: rank 3: all_reduce #5 (train.py:7) was not complete" in error
    assert "it ends here" in error


def test_a_close_that_is_the_first_to_hear_raises() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    dog.watch(FakeEvent(), "late", time.monotonic())
    soon(lambda: len(steps) >= 3)
    with pytest.raises(CollectiveTimeout, match="late"):
        dog.close()
    assert dog.close()
    assert steps == LATE


def test_after_a_close_nothing_is_late() -> None:
    steps: list[str] = []
    dog, communicator = watchdog(steps)
    dog.watch(FakeEvent(), "unfinished", time.monotonic() + 0.05)
    assert dog.close()
    communicator.error = NcclError("too late")
    time.sleep(0.15)
    dog.check()
    assert steps == []


# Over the stub -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_operations_of_real_ranks(crew: Crew, size: int) -> None:
    crew(size, "watchdog_in_peace")


def test_a_rank_whose_peer_leaves_out_a_call(crew: Crew) -> None:
    crew(2, "watchdog_ends_a_lonely_rank")


def test_an_asynchronous_error_of_nccl(crew: Crew) -> None:
    crew(2, "watchdog_hears_of_async_errors", NCCL_STUB_ASYNC="2:6")


def test_a_process_that_waits_elsewhere_is_ended(crew: Crew) -> None:
    done = crew(2, "watchdog_ends_a_deaf_program", fails=True)
    assert "all_reduce #0 (train.py:7) was not complete on the device" in done.stderr
    assert "not ended" not in done.stdout
