"""The watchdog alone, with events that complete when a test says so; bodies.py has it over the stub with real ranks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from collectives.backends.nccl.watchdog import Watchdog
from collectives.errors import CollectiveTimeout, NcclError
from tests.conftest import wait_until


class FakeEvent:
    """An event that passes when a test says so. error: what asking raises"""

    def __init__(self, passed: bool = False, error: Exception | None = None) -> None:
        self.passed = passed
        self.error = error


def passed(event: FakeEvent) -> bool:
    if event.error is not None:
        raise event.error
    return event.passed


class FakeCommunicator:
    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.error: Exception | None = None

    def async_error(self) -> Exception | None:
        return self.error

    def abort(self, reason: BaseException | None = None, timeout: float = 10.0) -> bool:
        self.steps.append(f"abort because of {type(reason).__name__}")
        return True


def watchdog(steps: list[str], **options: Any) -> tuple[Watchdog, FakeCommunicator]:
    def on_failure(error: Exception, calls: list[object]) -> None:
        steps.append(f"{calls} broken by {type(error).__name__}")

    settings = {"on_failure": on_failure, "leave": lambda status: steps.append(f"exit {status}"), "silence": 20.0}
    dog = Watchdog(3, passed, **{**settings, **options})
    communicator = FakeCommunicator(steps)
    dog.guard(communicator)
    return dog, communicator


def test_what_has_passed_is_forgotten_with_its_buffers() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    first, second = FakeEvent(), FakeEvent()
    buffers = {1, 2}
    kept = weakref.ref(buffers)
    dog.watch(first, buffers, "first", 20)
    dog.watch(second, None, "second", 20)
    del buffers
    first.passed = True
    wait_until(lambda: kept() is None)
    assert dog.in_flight() == ["second"]
    second.passed = True
    wait_until(lambda: not dog.in_flight())
    dog.check()
    dog.close()
    assert steps == []


def test_what_is_late_breaks_the_communicator_and_then_aborts_it() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    dog.watch(FakeEvent(), None, "long one", 20)
    dog.watch(FakeEvent(passed=True), None, "on another stream", 0.02)
    dog.watch(FakeEvent(), None, "all_gather #8 (train.py:9)", 0.05)
    wait_until(lambda: len(steps) >= 2)
    for _ in range(2):  # for ever
        with pytest.raises(CollectiveTimeout, match=r"rank 3: all_gather #8 \(train.py:9\) was not complete on"):
            dog.check()
    dog.close()
    assert steps == [
        "['long one', 'all_gather #8 (train.py:9)'] broken by CollectiveTimeout",
        "abort because of CollectiveTimeout",
    ]


@pytest.mark.parametrize("finder", ["async error", "event", "caller"])
def test_whatever_fails_is_raised(finder: str) -> None:
    steps: list[str] = []
    dog, communicator = watchdog(steps)
    if finder == "async error":  # though nothing is in flight
        communicator.error = NcclError("the network is down")
        says = "the network is down"
    elif finder == "event":
        dog.watch(FakeEvent(error=RuntimeError("an illegal memory access")), None, "all_reduce #1", 20)
        says = "rank 3: watching its operations failed: RuntimeError: an illegal memory access"
    else:
        dog.fail(ValueError("in the issuing thread"))
        dog.fail(NcclError("a second one does not count"))
        says = "ValueError: in the issuing thread"
    wait_until(lambda: len(steps) >= 2)
    with pytest.raises(NcclError, match=says):
        dog.check()
    dog.close()
    assert len(steps) == 2


def test_a_program_that_does_not_hear_of_it_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    watchdog(steps, silence=0.2)[0].watch(FakeEvent(), None, "all_reduce #5 (train.py:7)", 0)
    wait_until(lambda: "exit 1" in steps)
    assert len(steps) == 3
    error = capfd.readouterr().err
    assert "CollectiveTimeout: rank 3: all_reduce #5 (train.py:7) was not complete" in error
    assert "it ends here" in error


def test_a_close_that_is_the_first_to_hear_raises() -> None:
    steps: list[str] = []
    dog, _ = watchdog(steps)
    dog.watch(FakeEvent(), None, "late", 0)
    wait_until(lambda: len(steps) >= 2)
    with pytest.raises(CollectiveTimeout, match="late"):
        dog.close()
    dog.close()
