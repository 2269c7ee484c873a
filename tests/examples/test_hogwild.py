"""Processes that step on one model without a lock train it all the same."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import ROOT, Run

SCRIPT = ROOT / "examples/hogwild_digits.py"


def test_two_processes_train_one_model(run_job: Run) -> None:
    pytest.importorskip("sklearn")
    done = run_job([sys.executable, SCRIPT, "--epochs", "5"], code=0)
    match = re.search(r"test accuracy ([\d.]+) % .*, 2 processes", done.stdout)
    assert match
    assert float(match[1]) > 90
