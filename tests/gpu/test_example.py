"""The first example with `--device cuda`: the losses of the CPU, logged without a stall."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import ddp
from ddp import nn
from examples import train_digits


def losses(monkeypatch: pytest.MonkeyPatch, folder: Path, device: str) -> list[float]:
    lines = folder / f"{device}.jsonl"
    argv = ["train_digits.py", "--device", device, "--epochs", "1", "--batch-size", "256", "--metrics", str(lines)]
    monkeypatch.setattr(sys, "argv", argv)
    train_digits.main()
    return [json.loads(line)["loss"] for line in lines.read_text().splitlines()]


def test_losses_are_those_of_the_cpu_and_nobody_waits(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # An emulated convolution takes seconds.
    monkeypatch.setattr(train_digits, "make_net", lambda dtype: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    expected = losses(monkeypatch, tmp_path, "cpu")
    ddp.manual_seed(0)
    gpu.reset()
    found = losses(monkeypatch, tmp_path, "cuda")
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(found) == 6
    # DataParallel times its first steps to lay its buckets out; the guesses at the end are read.
    steps = [where for _, where in gpu.waits if "ddp/parallel/planner.py" not in where]
    assert len(steps) == 1
    assert "ddp/_cuda/copies.py" in steps[0]
