"""Whole scripts in the manner of those that people bring: each `import torch` read as one of ddp, against PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ports

FOLDER = Path(__file__).parent
NAMES = [path.stem for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("test_")]
SHORT = {"makemore"}  # the others run with --long


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in NAMES])
def test_a_script_computes_what_pytorch_does(name: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is the oracle here")
    if name == "mamba":
        pytest.importorskip("einops")
    port = ports.Port(name, FOLDER.name, [f"{name}.py"])
    ours, theirs = (ports.run(port, FOLDER.parent, library) for library in ("ddp", "torch"))
    assert (ours.error, theirs.error) == ("", "")
    assert sum(map(len, ours.noted)) > 10
    assert ports.difference(ours.noted, theirs.noted) < 1e-10
