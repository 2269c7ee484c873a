"""Scalars for TensorBoard: what is handed to its library, and, where that is installed, what it reads again."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError
from ddp.metrics import TensorBoard


class Writer:
    """Stands for those of the library, and takes notes."""

    calls: list[tuple[Any, ...]]

    def __init__(self, folder: str) -> None:
        self.calls.append(("open", folder))

    def add_event(self, event: Any) -> None:
        self.calls.append(("start", event.step))

    def add_scalar(self, tag: str, data: Any, step: int) -> None:
        self.calls.append((tag, data, step))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def close(self) -> None:
        self.calls.append(("close",))


class SessionLog:
    START = 1

    def __init__(self, status: int) -> None:
        assert status == self.START


@pytest.fixture
def calls(monkeypatch: Any) -> list[tuple[Any, ...]]:
    Writer.calls = []
    modules = {
        "tensorboard": types.ModuleType("tensorboard"),
        "tensorboard.summary": types.SimpleNamespace(Writer=Writer),
        "tensorboard.summary.writer.event_file_writer": types.SimpleNamespace(EventFileWriter=Writer),
        "tensorboard.compat.proto.event_pb2": types.SimpleNamespace(Event=types.SimpleNamespace, SessionLog=SessionLog),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:  # what is above it, for the import of it
            monkeypatch.setitem(sys.modules, name.rpartition(".")[0], modules.get(name.rpartition(".")[0], module))
    return Writer.calls


def test_what_is_handed_over(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with TensorBoard(folder, rank=0) as board:
        assert calls == []
        board.log(step=3, loss=ddp.tensor(0.5), lr=0.25)
        assert calls[:3] == [("open", folder), ("start", 3), ("close",)]
        del calls[:3]
        board.log(4, **{"train/loss": np.float32(2)})
        board.flush()
    assert calls == [
        ("open", folder),
        ("loss", 0.5, 3),
        ("lr", 0.25, 3),
        ("train/loss", 2.0, 4),
        ("flush",),
        ("close",),
    ]
    board.close()
    assert len(calls) == 6


def test_the_other_ranks_need_no_library(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with TensorBoard(tmp_path, rank=1) as board:
        board.log(step=3, loss=0.5)
        board.flush()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match=r"cannot be imported .*: pip install ddp-runtime\[tensorboard\]"):
        TensorBoard(tmp_path, rank=0)


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    for steps, loss in ((range(6), 1.0), (range(4, 8), 2.0)):  # the second attempt resumes at step 4
        with TensorBoard(tmp_path, rank=0) as board:
            for step in steps:
                board.log(step=step, loss=loss)
    read = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors("loss")]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
