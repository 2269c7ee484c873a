"""The fault matrix as data: which faults are tried in which collectives, and what must come of them."""

from __future__ import annotations

from typing import NamedTuple

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "reduce_scatter", "barrier")


class Outcome(NamedTuple):
    """What must come of a fault.

    says: matches what ddp-launch prints, the culprit named in it; bare: the same under mpiexec alone, whose own words
    these may be; None: MPICH takes it for an orderly end, says nothing and exits with 0
    code: ddp-launch's exit code; mpiexec's is 0 where it is, and another one where it is not
    within: seconds from the fault to the end of the job
    """

    says: str
    bare: str | None
    code: int
    within: float


# In these, NAME is the collective, LAST the culprit's number, and 0 the rank that tells of it, or the first that does.
_LEFT = r"rank LAST has left \(exit status 0\) while rank \d waits in NAME #3 \(rank.py:\d+\)"
_LATE = r"NAME #3 \(rank.py:\d+\).* was not complete after 3 s. Rank LAST has not arrived:\n  rank LAST \(pid \d+\): "
_LAST_CALL = r"last call NAME #2 \(rank.py:\d+\).*, done [2-9]\.\d s ago; its Python stood at rank.py:\d+ in "

_SLEEPS = _LATE + _LAST_CALL + "sleeps"
_STOPPED = _LATE + "stopped by a signal or a debugger; " + _LAST_CALL

_AT_ONCE = 5.0
_AFTER_THE_LIMIT = 3.0 + _AT_ONCE


def _different(theirs: str) -> Outcome:
    says = rf"made different calls .*\n  rank  +call .*\n  0\S* +NAME #3 .*\n  LAST +{theirs} +rank.py:\d+\n"
    return Outcome(says, says, 1, _AT_ONCE)


OUTCOMES = {
    "skips": Outcome(_LEFT, _LEFT, 1, _AT_ONCE),
    "same call elsewhere": Outcome("", "", 0, _AT_ONCE),
    "other branch": _different(r"OTHER #3 .*"),
    "wrong shape": _different(r"NAME #3 .* float32 \(4, 5\)"),
    "wrong dtype": _different(r"NAME #3 .* float64 \(4, 3\)"),
    "wrong op": _different(r"NAME #3 +max\b.*"),
    "wrong root": _different(r"NAME #3 .*\broot 1\b.*"),
    "sleeps": Outcome(_SLEEPS, _SLEEPS, 1, _AFTER_THE_LIMIT),
    "stops": Outcome(_STOPPED, _STOPPED, 1, _AFTER_THE_LIMIT),
    "killed": Outcome(
        r"ddp-launch: rank LAST \(pid \d+\) was killed by SIGKILL", r"(?i)killed|signal:? 9", 137, _AT_ONCE
    ),
    "raises": Outcome(
        r"ddp-launch: rank LAST \(pid \d+\) raised ValueError: a fault of the user's",
        "ValueError: a fault of the user's",
        1,
        _AT_ONCE,
    ),
    "exits 0": Outcome(_LEFT, _LEFT, 1, _AT_ONCE),
    "vanishes": Outcome(
        r"ddp-launch: rank LAST \(pid \d+\) exited with code 0 while others were waiting", None, 1, _AT_ONCE
    ),
    "exits 3": Outcome(r"ddp-launch: rank LAST \(pid \d+\) exited with code 3", "", 3, _AT_ONCE),
}

_NO_ARRAY = "it takes no array"
_NO_OP = "it takes no op"
_NO_ROOT = "it has no root"
_ROOTS_ALONE = "x is ignored off the root, so only the root's can count"

#: What means nothing, and why.
EXCLUDED = {
    ("wrong shape", "barrier"): _NO_ARRAY,
    ("wrong dtype", "barrier"): _NO_ARRAY,
    ("wrong shape", "scatter"): _ROOTS_ALONE,
    ("wrong dtype", "scatter"): _ROOTS_ALONE,
    **{("wrong op", name): _NO_OP for name in ("broadcast", "gather", "scatter", "all_gather", "barrier")},
    **{("wrong root", name): _NO_ROOT for name in ("all_reduce", "all_gather", "reduce_scatter", "barrier")},
}

PAIRS = [(fault, name) for fault in OUTCOMES for name in COLLECTIVES if (fault, name) not in EXCLUDED]
#: What runs every time; all other pairs with --long. Calls that differ otherwise than in shape are reported as those
#: that do (torch/test_store.py looks at each), a rank that exits with 0 ends as one that skips a call, one that sleeps
#: is late as one that is stopped, and of an exit with 3 the launcher's own tests tell.
SAMPLE = [
    ("skips", "all_reduce"),
    ("wrong shape", "broadcast"),
    ("stops", "scatter"),
    ("killed", "reduce"),
    ("raises", "gather"),
    ("vanishes", "reduce_scatter"),
]
#: Under mpiexec alone: each fault once.
BARE = [
    next((fault, name) for name in (*COLLECTIVES[n % 8 :], *COLLECTIVES) if (fault, name) not in EXCLUDED)
    for n, fault in enumerate(OUTCOMES)
]
BARE_SAMPLE = [pair for pair in BARE if pair[0] in ("wrong root", "exits 3")]


def ranks(name: str) -> int:
    """Three where a bystander is to be told too; two are enough for the rest, and faster."""
    return 3 if name == "all_reduce" else 2


def pattern(says: str, name: str) -> str:
    """The regular expression that the output must match."""
    other = "barrier" if name != "barrier" else "all_reduce"
    return says.replace("NAME", name).replace("OTHER", other).replace("LAST", str(ranks(name) - 1))
