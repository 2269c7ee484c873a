"""Memory of backward beside PyTorch's: what the benchmark measures, held as a bound."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "train_step.py"


def test_a_deep_network_takes_no_more_than_pytorch() -> None:
    pytest.importorskip("torch", reason="PyTorch is the oracle here")
    peak = runpy.run_path(str(BENCHMARK))["peak"]
    assert peak("deep", "ddp") <= 1.1 * peak("deep", "torch")
