"""Progress bars: of rank 0, repainted where somebody does, and otherwise a last line alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from collectives import world
from ddp.data import DataLoader
from ddp.metrics import ProgressBar, _bar
from ddp.metrics._bar import state
from tests.ddp.data.loading.samples import Stream

PROGRAM = """
import sys, time
from ddp.metrics import ProgressBar
sys.modules["tqdm"] = None if sys.argv[1] == "plain" else sys.modules.get("tqdm")
if sys.argv[1] != "plain": del sys.modules["tqdm"]
bar = ProgressBar(range(4), desc="train", rank=0)
for step in bar:
    time.sleep(0.12)
    bar.set_postfix(loss=0.5)
for _ in ProgressBar(range(4), desc="other", rank=1): pass
"""


def printed(run_job: Callable[..., subprocess.CompletedProcess[str]], kind: str, env: dict[str, str]) -> str:
    done = run_job([sys.executable, "-c", PROGRAM, kind], env=env, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    return done.stderr.decode()  # bytes, since reading text makes a line end of `\r`


@pytest.mark.parametrize("kind", ["plain", "tqdm"])
def test_where_nobody_repaints_the_last_state_alone_is_printed(run_job: Any, kind: str) -> None:
    text = printed(run_job, kind, {})
    assert text.startswith("train: 4/4 steps (100 %) in 0:00, ")
    assert text.endswith(", loss=0.5\n")
    assert "\r" not in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("kind", ["plain", "tqdm"])
def test_under_ddp_launch_it_is_repainted(run_job: Any, kind: str) -> None:
    if kind == "tqdm":
        pytest.importorskip("tqdm")
    text = printed(run_job, kind, {_bar.KEEPER: "1"})
    assert text.count("\r") > 2
    assert text.count("\n") == 1
    assert "4/4" in text.rpartition("\r")[2]
    assert "other" not in text
    assert ("#" in text or "█" in text) == (kind == "tqdm")


def test_the_variable_is_that_of_the_contract() -> None:
    assert _bar.KEEPER == world.KEEPER


def fail_within(bar: ProgressBar) -> None:
    with bar:
        bar.update(2)
        raise ZeroDivisionError


def test_all_ranks_iterate(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(_bar.KEEPER, raising=False)
    for rank in range(2):
        assert list(ProgressBar(iter("abc"), rank=rank)) == ["a", "b", "c"]
    assert capsys.readouterr().err.startswith("3 steps in 0:00, ")
    assert len(list(ProgressBar(DataLoader(Stream(5), 2), rank=0))) == 3  # its loader has no length, either
    assert capsys.readouterr().err.startswith("3 steps in 0:00, ")
    bar = ProgressBar(total=4, initial=1, unit="epoch", rank=0)
    with pytest.raises(ZeroDivisionError):
        fail_within(bar)
    assert capsys.readouterr().err.startswith("3/4 epochs (75 %) in 0:00, ")
    bar.close()  # again: nothing more is printed
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("train", 0, 30, 120, "step", 15.0), "train: 30/120 steps (25 %) in 0:15, 2.0 steps/s, 0:45 left"),
        (("", 100, 130, None, "step", 60.0), "130 steps in 1:00, 0.5 steps/s"),
        (("", 0, 0, 10, "step", 0.0), "0/10 steps (0 %) in 0:00, 0.0 steps/s"),
        (("", 0, 10, 10, "epoch", 7201.0), "10/10 epochs (100 %) in 2:00:01, 0.0 epochs/s"),
    ],
)
def test_what_a_line_says(arguments: Any, text: str) -> None:
    assert state(*arguments) == text
