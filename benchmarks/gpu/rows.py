"""What is promised: which implementations of which task are compared, and how large the ratio has to be."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Promise:
    """ours over theirs, in speed (at least `goal`) or, if `slower`, in time (at most `goal`).

    goal: None: a row for comparison; what: is measured, where the names of the implementations do not say it
    """

    task: str
    ours: tuple[str, ...]  # the fastest of them counts
    theirs: str
    goal: float | None
    slower: bool = False
    what: str = ""

    @property
    def label(self) -> str:
        """As the table says it."""
        what = self.what or ("time" if self.slower else "speed")
        return f"{self.task}: {what}, {' or '.join(self.ours)} over {self.theirs}"

    def met(self, ratio: float) -> bool | None:
        """Whether a ratio keeps the promise; None for a row without a goal."""
        if self.goal is None:
            return None
        return ratio <= self.goal if self.slower else ratio >= self.goal


HOOKS = "time with hooks and buckets, world size 1"
PROMISES = (
    Promise(task="gpt2", ours=("ddp", "ddp-graph"), theirs="torch", goal=1.0),
    Promise(task="gpt2", ours=("ddp", "ddp-graph"), theirs="torch-compile", goal=0.9),
    Promise(task="small-gpt", ours=("ddp-graph",), theirs="torch", goal=3.0),
    Promise(task="small-gpt", ours=("ddp-graph",), theirs="torch-graphs", goal=1.0),
    Promise(task="resnet18", ours=("ddp", "ddp-graph"), theirs="torch", goal=1.0),
    # A world of one communicates nothing: what is measured is what hooks and buckets cost the step.
    Promise(task="gpt2", ours=("ddp-parallel",), theirs="ddp", goal=1.03, slower=True, what=HOOKS),
    Promise(task="gpt2", ours=("torch-parallel",), theirs="torch", goal=None, slower=True, what=HOOKS),
)


def implementations(task: str) -> list[str]:
    """Everybody whom a promise about this task names, PyTorch's eager mode first: the others are compared with it."""
    named = ["torch", *(name for each in PROMISES if each.task == task for name in (*each.ours, each.theirs))]
    return list(dict.fromkeys(named))


def ratio(promise: Promise, rounds: Mapping[str, Sequence[float]]) -> float | None:
    """The median of the rounds' ratios, of our fastest implementation; None where no implementation of a side ran.

    rounds: of each implementation the seconds of a step, one number a round
    """
    able = [name for name in promise.ours if rounds.get(name)]
    if not able or not rounds.get(promise.theirs):
        return None
    best = min(able, key=lambda name: statistics.median(rounds[name]))
    pairs = zip(rounds[best], rounds[promise.theirs], strict=True)
    return statistics.median(a / b if promise.slower else b / a for a, b in pairs)


TIGHT, STEPS = 0.005, 3  # the tolerance of the first losses, relative, and absolute below 1
NOISE = 3.0  # later ones may differ by as many times what two runs of PyTorch differ by


def differs(losses: Sequence[float], expected: Sequence[float], again: Sequence[float]) -> str | None:
    """How the losses of the first steps differ from those of PyTorch's eager mode; None where they agree.

    again: PyTorch's own losses, the samples of each batch in another order: the same but for rounding, which training
    makes larger with every step
    """
    noise = 0.0
    for step, (ours, theirs, other) in enumerate(zip(losses, expected, again, strict=True)):
        noise = max(noise, abs(theirs - other))
        allowed = TIGHT * max(1.0, abs(theirs))
        if step >= STEPS:
            allowed = max(allowed, NOISE * noise)
        if not abs(ours - theirs) <= allowed:
            return f"the loss of step {step} is {ours:.4f}, and PyTorch's {theirs:.4f}; {allowed:.4f} may differ"
    return None
