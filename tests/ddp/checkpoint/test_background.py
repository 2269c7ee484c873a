"""Saving beside training: what is saved is the state of one moment, whatever happens to it meanwhile."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
import ddp
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer, open_checkpoint
from ddp.checkpoint import snapshot as snapshots
from ddp.checkpoint.snapshot import Snapshot
from ddp.errors import CheckpointError
from ddp.optim import SGD
from tests.ddp.checkpoint.stores import Arrays
from tests.ddp.checkpoint.training import Loader

PROGRAM = """
import sys
from ddp import nn, optim
from ddp.checkpoint import Checkpointer
model = nn.Linear(1000, 1000)
ckpt = Checkpointer(sys.argv[1], model=model, optimizer=optim.SGD(model.parameters(), lr=0.1), async_save=True)
ckpt.save()
"""
WIDE = 200  # a weight of 160 kB is copied in the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is copied in the background until it is set."""
    event = threading.Event()
    copy = Snapshot.copy

    def held(self: Snapshot) -> None:
        assert event.wait(20)
        copy(self)

    monkeypatch.setattr(Snapshot, "copy", held)
    return event


def make(folder: Path, comm: Communicator | None = None, **options: Any) -> tuple[Any, Any, Checkpointer]:
    net: Any = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))
    model = net if comm is None else ddp.DataParallel(net, comm)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, async_save=True, **options)
    return model, optimizer, ckpt


def inputs() -> ddp.Tensor:
    return ddp.tensor(np.random.default_rng(2).standard_normal((4, WIDE)), dtype=ddp.float32)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(inputs()).pow(3).sum().backward()
    optimizer.step()


def tensors(model: Any) -> Arrays:
    return {f"model.{name}": value.numpy().copy() for name, value in model.state_dict().items()}


def assert_saved(path: Path, expected: Arrays) -> None:
    saved = open_checkpoint(path)
    for name, array in expected.items():
        assert_array_equal(saved.read(name), array, err_msg=name)


def test_a_step_waits_for_the_copy_and_forward_and_backward_do_not(folder: Path, gate: threading.Event) -> None:
    model, optimizer, ckpt = make(folder)
    step(model, optimizer)
    expected = tensors(model)
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    expected["optimizer.0.0.weight.momentum_buffer"] = momentum.numpy().copy()
    ckpt.save()
    optimizer.zero_grad()
    model(inputs()).pow(3).sum().backward()  # running statistics change, and gradients
    threading.Timer(0.2, gate.set).start()
    begun = time.monotonic()
    optimizer.step()
    assert time.monotonic() - begun > 0.15
    ckpt.close()
    assert_saved(folder / "step-0000000000", expected)
    assert (tensors(model)["model.0.weight"] != expected["model.0.weight"]).any()


def test_what_is_changed_behind_its_back_is_saved_anew(
    folder: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, ckpt = make(folder)
    ckpt.save()
    with ddp.no_grad():
        model[0].weight.mul_(2.0)
    gate.set()
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        ckpt.wait()
    assert "changed by something else than optimizer.step" in caplog.text
    assert_saved(folder / "step-0000000000", tensors(model))
    ckpt.close()


def test_one_save_at_a_time(folder: Path, gate: threading.Event) -> None:
    _, _, ckpt = make(folder, every=1)
    loop = ckpt.resume(Loader(ckpt._comm), epochs=1)
    next(loop)
    next(loop)  # the first step is being saved, and the copy waits
    first = ckpt._saving
    assert first is not None
    next(loop)
    assert ckpt._saving is first
    gate.set()
    assert list(loop) == []
    ckpt.close()
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000000001", "step-0000000003"]


def test_a_save_whose_thread_cannot_start_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    _, _, ckpt = make(folder)
    monkeypatch.setattr(snapshots, "_unfinished", set())
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ckpt.save()
    assert not snapshots._unfinished
    ckpt.close()


@pytest.mark.parametrize("size", [1, 3])
def test_errors_surface_on_all_ranks_after_the_same_step(
    size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has no memory for a part that it copies in the background."""
    copier = snapshots._copier
    failures = iter([MemoryError("no memory")])

    def failing_copier(array: Any, target: Any) -> Any:
        def copy() -> None:
            for failure in failures:
                raise failure
            copier(array, target)()

        return copy

    monkeypatch.setattr(snapshots, "_copier", failing_copier)

    def train(comm: Communicator) -> int:
        model, optimizer, ckpt = make(folder, comm, every=2)

        def loop() -> None:
            for _ in ckpt.resume(Loader(comm), epochs=50):
                time.sleep(0.005 * comm.rank)
                step(model, optimizer)

        with pytest.raises(CheckpointError, match=r"step 2 was not saved.*no memory"), ckpt:
            loop()
        return ckpt.step

    assert len(set(collectives.run_threads(train, size=size))) == 1
    assert not list(folder.glob("step-*"))


def test_a_save_that_fails_at_exit_is_told(folder: Path, run_job: Any) -> None:
    code = PROGRAM.replace("ckpt.save()", "ckpt._store.write = lambda *_, **__: 1 // 0; ckpt.save()")
    done = run_job([sys.executable, "-c", code, str(folder)], code=0)
    assert "a save failed while the process was ending: ZeroDivisionError" in done.stderr
