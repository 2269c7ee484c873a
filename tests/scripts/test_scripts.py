"""Whole scripts in the manner of those that people bring: each `import torch` read as one of ddp, against PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import ports

FOLDER = Path(__file__).parent
NAMES = [path.stem for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("test_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_computes_what_pytorch_does(name: str) -> None:
    if name == "mamba":
        pytest.importorskip("einops")
    port = ports.Port(name, FOLDER.name, [f"{name}.py"])
    ours = ports.run(port, FOLDER.parent, "ddp")
    assert not ours.error
    assert sum(map(len, ours.noted)) > 10
    if importlib.util.find_spec("torch") is not None:
        theirs = ports.run(port, FOLDER.parent, "torch")
        assert not theirs.error
        assert ports.difference(ours.noted, theirs.noted) < 1e-10
