"""Files for TensorBoard: what its library reads again, and that only rank 0 needs it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError
from ddp.metrics import SummaryWriter, TensorBoard


@pytest.fixture(autouse=True)
def _files_of_one_second_in_order(monkeypatch: Any) -> None:
    """Readers sort files by their names, which hold the second and a counter: 10 would come before 9."""
    if importlib.util.find_spec("tensorboard") is not None:
        files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(100))


def test_the_other_ranks_need_no_library(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with TensorBoard(tmp_path, rank=1) as board:
        board.log(step=3, loss=0.5)
        board.flush()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match=r"cannot be imported .*: pip install .*\[tensorboard\]"):
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
    results = [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors("loss")]
    assert sorted(read.Tags()["tensors"]) == ["loss", "train/lr"]
    assert results == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]


def written(t: Any, folder: Path) -> dict[str, Any]:
    """What PyTorch's own reader, TensorBoard's, finds below a folder after the same calls."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = importlib.import_module(f"{t.__name__}.utils.tensorboard").SummaryWriter
    with writer(folder, flush_secs=1) as board:
        assert board.get_logdir() == board.log_dir
        for step in range(6):
            board.add_scalar("loss/train", t.tensor(1.0 / (step + 1)), step)
        board.add_scalars("rates", {"a": 1, "b": np.float32(2)}, global_step=3)
        board.add_text("note", "**bold**")
        board.add_histogram("weights", t.tensor([0.0, 1, 1, 2]).requires_grad_(), 2, bins=np.array([0.0, 1.0, 2.0]))
        board.flush()
    with writer(folder, purge_step=4) as board:
        for step in range(4, 7):
            board.add_scalar("loss/train", 9.0, step)
    result: dict[str, Any] = {}
    for path in sorted({file.parent for file in Path(folder).rglob("*tfevents*")}):
        read = EventAccumulator(str(path)).Reload()
        tags = read.Tags()
        run = str(path.relative_to(folder))
        result |= {f"{run} {tag}": [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags["scalars"]}
        result |= {f"{run} {tag}": [e.tensor_proto.string_val[0] for e in read.Tensors(tag)] for tag in tags["tensors"]}
        for tag in tags["histograms"]:
            [event] = read.Histograms(tag)
            value = event.histogram_value
            counts = {limit: n for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n}
            result[f"{run} {tag}"] = event.step, counts, value.min, value.max, value.num, value.sum, value.sum_squares
    return result


def test_a_summary_writer_writes_what_pytorchs_does(tmp_path: Path, torch: Any) -> None:
    pytest.importorskip("tensorboard")
    ours = written(ddp, tmp_path / "ours")
    assert ours == written(torch, tmp_path / "theirs")
    assert [step for step, _ in ours[". loss/train"]] == [0, 1, 2, 3, 4, 5, 6]


def test_a_histogram_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with SummaryWriter(tmp_path) as board:
        board.add_histogram("x", ddp.tensor([float("nan"), float("inf"), 0.5]).bfloat16())
        board.add_histogram("y", [float("nan")])
    [event] = EventAccumulator(str(tmp_path)).Reload().Histograms("x")
    assert (event.histogram_value.num, event.histogram_value.sum, len(event.histogram_value.bucket)) == (1, 0.5, 31)


def test_rank_0_of_the_world_writes_summaries(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    monkeypatch.setenv("PMI_RANK", "1")
    with SummaryWriter(tmp_path, purge_step=1) as board:  # without the library
        board.add_scalar("loss", object(), 1)
        board.add_scalars("losses", {"a": object()})
        board.add_histogram("weights", object())
        board.add_text("note", "text")
        board.flush()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ArgumentError, match=r"SummaryWriter: .* pip install .*\[tensorboard\]"):
        SummaryWriter(tmp_path)


def test_the_folder_that_a_summary_writer_takes_by_itself(monkeypatch: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    with SummaryWriter(comment="_lr") as board:
        board.add_scalar("loss", 1)
    [run] = (tmp_path / "runs").iterdir()
    assert str(run.relative_to(tmp_path)) == board.log_dir
    assert run.name.endswith("_lr")
