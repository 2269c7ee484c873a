"""What is promised: which contestants of which task are compared, and how large the ratio has to be."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Promise:
    """ours over theirs, in speed (`faster`: at least `goal`) or in time (`slower`: at most `goal`)."""

    task: str
    ours: tuple[str, ...]  # the fastest of them counts
    theirs: str
    goal: float
    slower: bool = False

    @property
    def label(self) -> str:
        """As the table says it."""
        what = "time" if self.slower else "speed"
        return f"{self.task}: {what} of {' or '.join(self.ours)} over {self.theirs}"

    def met(self, ratio: float) -> bool:
        """Whether a ratio keeps the promise."""
        return ratio <= self.goal if self.slower else ratio >= self.goal


PROMISES = (
    Promise(task="gpt2", ours=("ddp", "ddp-graph"), theirs="torch", goal=1.0),
    Promise(task="gpt2", ours=("ddp", "ddp-graph"), theirs="torch-compile", goal=0.9),
    Promise(task="small-gpt", ours=("ddp-graph",), theirs="torch", goal=3.0),
    Promise(task="small-gpt", ours=("ddp-graph",), theirs="torch-graphs", goal=1.0),
    Promise(task="resnet18", ours=("ddp", "ddp-graph"), theirs="torch", goal=1.0),
    Promise(task="gpt2", ours=("ddp-parallel",), theirs="ddp", goal=1.03, slower=True),
)


def contestants(task: str) -> list[str]:
    """Everybody whom a promise about this task names, PyTorch's eager mode first: the others are compared with it."""
    named = ["torch", *(name for each in PROMISES if each.task == task for name in (*each.ours, each.theirs))]
    return list(dict.fromkeys(named))


def ratio(promise: Promise, rounds: Mapping[str, Sequence[float]]) -> float | None:
    """The median of the rounds' ratios, of our fastest contestant; None where nobody of a side was able to run.

    rounds: of each contestant the seconds of a step, one number a round
    """
    able = [name for name in promise.ours if rounds.get(name)]
    if not able or not rounds.get(promise.theirs):
        return None
    best = min(able, key=lambda name: statistics.median(rounds[name]))
    pairs = zip(rounds[best], rounds[promise.theirs], strict=True)
    return statistics.median(a / b if promise.slower else b / a for a, b in pairs)


def differs(losses: Sequence[float], expected: Sequence[float], tolerance: float = 0.02) -> str | None:
    """How the losses of the first steps differ from those of PyTorch's eager mode; None where they agree.

    tolerance: relative, and absolute for losses below 1; products in bfloat16 have 8 bits
    """
    for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
        if not abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)):
            return f"the loss of step {step} is {ours:.4f}, and PyTorch's {theirs:.4f}"
    return None
