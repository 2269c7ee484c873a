"""A job that is asked to stop: all ranks do so after the same step, with everything saved."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import collectives
import ddp
from collectives.communicator import Communicator
from collectives.world import STOPPED
from ddp.checkpoint import Checkpointer, open_checkpoint, signals
from ddp.checkpoint.signals import StopSignals
from ddp.optim import SGD
from ddp.parallel.control import STOP, PendingRequests
from tests.conftest import wait_until
from tests.ddp.checkpoint.training import Loader, net

INPUTS = 6


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def go_on(ckpt: Checkpointer) -> None:
    pass


def training(
    comm: Communicator,
    folder: Path,
    ask: Callable[[Checkpointer], None] = go_on,
    *,
    when: str = "step",
    wrapped: bool = True,
    micro: int = 1,
    epochs: int = 4,
    **options: Any,
) -> tuple[int, int]:
    """(the step after which the rank stopped, its exit code), 0 if it came to its end.

    when `ask` is called: "before" the loop, in each "step", or there "after" its backward
    """
    model = ddp.DataParallel(net(), comm) if wrapped else net()
    optimizer = SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, **options)
    try:
        with ckpt:
            if when == "before":
                ask(ckpt)
            for _ in ckpt.resume(Loader(comm), epochs=epochs):
                if when == "step":
                    ask(ckpt)
                last = (ckpt.step + 1) % micro == 0
                with nullcontext() if last or not wrapped else model.no_sync():
                    model(ddp.ones(2, INPUTS)).sum().backward()
                if when == "after":
                    ask(ckpt)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    except SystemExit as stop:
        return ckpt.step, int(str(stop.code))
    return ckpt.step, 0


@pytest.mark.parametrize(("size", "wrapped", "background"), [(1, False, False), (3, True, True), (3, False, False)])
def test_one_rank_is_asked_and_all_stop_after_the_same_step(
    size: int, wrapped: bool, background: bool, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def ask(ckpt: Checkpointer) -> None:
        time.sleep(0.002 * ckpt._comm.rank)
        if ckpt.step == 4 and ckpt._comm.rank == size - 1:
            ckpt.request_stop()

    options = {"wrapped": wrapped, "async_save": background, "every": 2}
    ends = collectives.run_threads(lambda comm: training(comm, folder, ask, **options), size=size)
    assert ends == [(5, STOPPED)] * size
    said = [line for line in capfd.readouterr().err.splitlines() if "stopped as asked" in line]
    assert said == [f"stopped as asked at step 5, state saved in {folder}: start the same command to go on"]
    assert open_checkpoint(folder / "step-0000000005").step == 5
    ends = collectives.run_threads(lambda comm: training(comm, folder, wrapped=wrapped), size=size)
    assert ends == [(12, 0)] * size


def test_a_stop_waits_for_the_end_of_an_accumulation(folder: Path) -> None:
    def ask(ckpt: Checkpointer) -> None:
        if ckpt.step == 4 and ckpt._comm.rank == 1:
            ckpt.request_stop()

    ends = collectives.run_threads(lambda comm: training(comm, folder, ask, micro=4, every=1, keep=None), size=2)
    assert ends == [(8, STOPPED)] * 2
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000000004", "step-0000000008"]


@pytest.mark.parametrize(("when", "reached"), [("before", 0), ("after", 3)])
def test_asked_before_the_first_step_or_after_the_last(when: str, reached: int, folder: Path) -> None:
    def ask(ckpt: Checkpointer) -> None:
        if ckpt._comm.rank == 1 and (when == "before" or ckpt.step == 2):  # whose last message has gone
            ckpt.request_stop()

    ends = collectives.run_threads(lambda comm: training(comm, folder, ask, when=when, epochs=1), size=2)
    assert ends == [(reached, STOPPED)] * 2
    # What was done is done: the loop has nothing left, and what follows it runs.
    ends = collectives.run_threads(lambda comm: training(comm, folder, epochs=1), size=2)
    assert ends == [(3, 0)] * 2


def test_a_loop_of_ones_own(folder: Path) -> None:
    def train(comm: Communicator) -> tuple[int, Any]:
        model = ddp.DataParallel(net(), comm)
        optimizer = SGD(model.parameters(), lr=0.1)
        ckpt = Checkpointer(folder, model=model, optimizer=optimizer, comm=comm)
        ckpt.load()
        try:
            with ckpt.signals():
                while True:
                    model(ddp.ones(1, INPUTS)).sum().backward()
                    optimizer.step()
                    ckpt.step += 1
                    if ckpt.step % 3 == 0 and comm.rank == 0:
                        ckpt.request_stop()
                    if ckpt.stop_requested:
                        ckpt.stop()
        except SystemExit as stop:
            return ckpt.step, stop.code

    assert collectives.run_threads(train, size=2) == [(4, STOPPED)] * 2
    assert collectives.run_threads(train, size=2) == [(7, STOPPED)] * 2


def test_seconds_are_rank_0s(folder: Path) -> None:
    def train(comm: Communicator) -> None:
        seconds = 0.05 if comm.rank == 0 else 1e-9
        training(comm, folder, lambda _: time.sleep(0.03), every_seconds=seconds, keep=None)

    collectives.run_threads(train, size=2)
    first, *others, last = [open_checkpoint(path).step for path in sorted(folder.glob("step-*"))]
    assert first >= 2
    assert len(others) <= 5
    assert last == 12


# -- signals


def test_the_second_ctrl_c_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with StopSignals(PendingRequests()):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same one, by another way
        now += 2 * signals._TWICE
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals of a program's own handler of SIGTERM; it ignores SIGUSR1."""
    numbers = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    ignored = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield numbers
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGUSR1, ignored)


def test_handlers_that_were_there_are_called_and_ignored_signals_stay_ignored(heard: list[int]) -> None:
    with StopSignals(requests := PendingRequests()):
        signal.raise_signal(signal.SIGUSR1)
        assert not requests.requested[STOP]
        signal.raise_signal(signal.SIGTERM)
        assert requests.requested[STOP]
    assert heard == [signal.SIGTERM]


def test_a_rank_does_not_wait_for_a_step_that_a_peer_has_left(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "peer_failed", lambda: True)
    with StopSignals(requests := PendingRequests()):
        signal.raise_signal(signal.SIGTERM)
    assert (heard, requests.requested[STOP]) == ([signal.SIGTERM], False)


def test_contexts_that_are_left_in_another_order_let_signals_through() -> None:
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    contexts = [StopSignals(PendingRequests()) for _ in range(2)]
    for each in contexts:
        each.__enter__()
    for each in contexts:
        each.__exit__(None, None, None)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PROGRAM = """
import sys, time
import ddp
from ddp import nn, optim
from ddp.checkpoint import Checkpointer

class Loader:
    epoch = 0
    def __iter__(self):
        while True:
            yield ddp.ones(2, 3)
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

net = nn.Linear(3, 1)
model = ddp.DataParallel(net)
optimizer = optim.SGD(model.parameters(), lr=1e-3)
ckpt = Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every=1000000)
for batch in ckpt.resume(Loader(), epochs=1):
    model(batch).sum().backward()
    optimizer.step()
    if ckpt.step % 50 == 49:
        print("ready", flush=True)
    time.sleep(0.002)
"""


def test_one_process_stops_by_ctrl_c(folder: Path, start_job: Any) -> None:
    job = start_job([sys.executable, "-c", PROGRAM, folder])
    assert job.process.stdout.readline() == "ready\n"
    os.kill(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == STOPPED, done.stderr
    assert done.stderr.startswith("stopped as asked at step "), done.stderr
    assert done.stderr.count("\n") == 1
    [saved] = folder.glob("step-*")
    assert open_checkpoint(saved).step >= 50


@pytest.mark.mpi
def test_a_job_stops_by_a_signal_to_one_rank(folder: Path, start_job: Any, mpiexec: list[str], tmp_path: Path) -> None:
    # An engine tears lines: what ranks have to say they leave in files.
    told = f'import os; open(f"{tmp_path}/{{os.getpid()}}", "x")'
    program = PROGRAM.replace('print("ready", flush=True)', f"if ckpt.step == 49: {told}")
    job = start_job([*mpiexec, "-n", "2", sys.executable, "-c", program, folder])
    wait_until(lambda: len(os.listdir(tmp_path)) == 2)
    os.kill(int(os.listdir(tmp_path)[1]), signal.SIGTERM)
    done = job.wait()
    assert done.returncode == STOPPED, done.stderr
    assert done.stderr.count("stopped as asked at step ") == 1
    assert len(list(folder.glob("step-*"))) == 1
