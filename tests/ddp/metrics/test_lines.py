"""JSON lines: whole ones, of rank 0, and each step once however often the job was resumed."""

from __future__ import annotations

import errno
import json
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError
from ddp.metrics import JsonLines


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path, rank=0) as lines:
        lines.log(step=0, loss=ddp.tensor(0.5), lr=np.float32(0.25), name="x", more={"a": [1, None, True]})
        assert read(path) == [{"step": 0, "loss": 0.5, "lr": 0.25, "name": "x", "more": {"a": [1, None, True]}}]
        lines.log(np.int64(1), loss=float("nan"), worst=[np.float64("inf")])
    assert path.read_text().splitlines()[1] == '{"step": 1, "loss": null, "worst": [null]}'


def test_the_other_ranks_do_not_even_look(tmp_path: Path) -> None:
    class Unready:
        def item(self) -> float:
            pytest.fail("this would wait for the device")

    JsonLines(tmp_path / "x", rank=1).log(step=0, loss=Unready())
    JsonLines(tmp_path / "x", comm=types.SimpleNamespace(rank=3)).log(step=0, loss=Unready())
    assert not (tmp_path / "x").exists()
    JsonLines(tmp_path / "x", comm=types.SimpleNamespace(rank=0)).log(step=0)
    assert read(tmp_path / "x") == [{"step": 0}]
    for wrong in ({}, {"rank": 0, "comm": types.SimpleNamespace(rank=0)}):
        with pytest.raises(ArgumentError, match="JsonLines: expected this process's rank, or its communicator"):
            JsonLines(tmp_path / "x", **wrong)


def test_a_full_disk_is_named_and_leaves_no_half_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write = os.write
    with JsonLines(path, rank=0) as lines:
        lines.log(0, loss=1.0)
        room = iter([5])

        def filling(number: int, data: bytes) -> int:
            for left in room:
                return write(number, data[:left])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", filling)
        with pytest.raises(OSError, match=r"No space left on device: .*metrics.jsonl"):
            lines.log(1, loss=2.0)
        monkeypatch.undo()
        lines.log(2, loss=3.0)
    assert [line["step"] for line in read(path)] == [0, 2]


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        ("", 0, []),
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', 2, [1]),
        ('{"step": 1}\n{"step": 4}\n{"step": 2}\n', 3, [1, 2]),
        ('{"step": 1}\n{"step": 2', 5, [1]),
        ('{"step": 1}\n{"step": 2}', 5, [1]),
    ],
)
def test_a_job_that_resumes_has_each_step_once(before: str, step: int, after: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    lines = JsonLines(path, rank=0)
    assert path.read_text() == before
    lines.log(step=step)
    lines.log(step=step, what="a second line of this step")
    lines.close()
    assert [line["step"] for line in read(path)] == [*after, step, step]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("foreign", ["hello\n", "[1]\n", '{"loss": 1}\n', '{"step": "a"}\n', "3\n", "\xff\n"])
def test_a_file_of_something_else_is_left_alone(foreign: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"step": 1}\n' + foreign.encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="x, line 2: expected JSON with a step"):
        JsonLines(path, rank=0).log(step=0)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("step", "value", "says"),
    [
        (0.5, 0, "expected a step that is a whole number, got 0.5"),
        (0, np.zeros(2), "JsonLines.log: value: can only convert an array of size 1"),
        (0, object(), "JsonLines.log: value: Object of type object is not JSON serializable"),
    ],
)
def test_what_json_cannot_hold(step: Any, value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=says):
        JsonLines(tmp_path / "x", rank=0).log(step=step, value=value)
    assert not (tmp_path / "x").exists()


def test_no_file_stays_open(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "x", rank=0) as lines:
        for step in range(3):
            lines.log(step=step)
            lines.close()
    assert [line["step"] for line in read(tmp_path / "x")] == [0, 1, 2]
    assert lines._number is None
