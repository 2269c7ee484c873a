"""Scalars for TensorBoard: what its library reads again, and that only rank 0 needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError
from ddp.metrics import TensorBoard


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
                board.log(step=step, loss=ddp.tensor(loss), **{"train/lr": np.float32(step)})
            board.flush()
    read = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors("loss")]
    assert sorted(read.Tags()["tensors"]) == ["loss", "train/lr"]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
