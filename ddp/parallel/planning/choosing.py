"""Which buckets are best follows from when gradients are ready and what the wire costs: it is chosen, not guessed.

Every bucket costs the wire a latency, so few are good; but a bucket waits for the last of its gradients, so that large
ones start late, and what is sent after backward has ended is time that nothing hides. Given each gradient's ready time
and the cost alpha + beta * n of an all-reduce of n bytes, the plan that ends first is found exactly.

The model of the cost is that of Shi et al. 2019, MG-WFBP, arXiv:1811.11141.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Plans whose ends differ by less are the same to us: ready times and costs are measured, and steps vary by more than
#: this. Of such plans the one with fewest buckets is least exposed to what the model of the cost leaves out.
TOLERANCE = 0.005

# No more buckets than this are tried. Any plan can be thinned to 2 / TOLERANCE buckets and ends later by no more than
# TOLERANCE: cut time into slices of TOLERANCE * end, and join all buckets but the first that end in the same slice.
# What a joined bucket ends later than its last member did is then less than a slice, and such delays do not add up:
# the next bucket either waits for its gradients anyway, or hands on the delay that it was handed.
_MOST = round(2 / TOLERANCE)

_TICK = 1e-12  # s; nothing takes less


# A bucket is large enough if its latency is no more than this of its time on the wire.
_LATENCY = 0.02


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one all-reduce of n bytes takes: alpha + beta * n. alpha: seconds; beta: seconds per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan should do, in seconds after backward began.

    launched: when each bucket is complete, and all before it have been launched; done: when each is reduced
    backward: when the computation ends; end: when everything does; exposed: the communication that nothing hides
    """

    launched: tuple[float, ...]
    done: tuple[float, ...]
    backward: float
    end: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class _Load:
    """A bucket: its gradients, when the last of them is ready, in seconds, and their bytes."""

    members: list[int]
    ready: float
    nbytes: int

    def __add__(self, other: _Load) -> _Load:
        return _Load(
            members=self.members + other.members,
            ready=max(self.ready, other.ready),
            nbytes=self.nbytes + other.nbytes,
        )


def forecast(
    plan: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    ready: Sequence[float],
    link: Link,
    backward: float,
    launch: float = 0.0,
) -> Forecast:
    """What a plan should do: buckets go in the plan's order, one at a time on the wire.

    plan: the gradients of each bucket, in the order of launching; nbytes, ready: bytes of each gradient, and seconds
    after backward began when it is complete
    backward: seconds that the computation takes alone; launch: seconds that each bucket adds to it, and by which
    everything later is ready later
    """
    launched, done = _times([_load(members, nbytes, ready) for members in plan], link, launch)
    computed = backward + launch * len(plan)
    end = max([computed, *done[-1:]])
    return Forecast(
        launched=tuple(launched), done=tuple(done), backward=computed, end=end, exposed=max(0.0, end - computed)
    )


def choose_buckets(
    nbytes: Sequence[int],
    ready: Sequence[float],
    link: Link,
    kinds: Sequence[Hashable] | None = None,
    launch: float = 0.0,
) -> list[list[int]]:
    """The plan that is reduced first; of plans whose ends differ by less than `TOLERANCE`, one with fewest buckets.

    nbytes, ready: bytes of each gradient, and seconds after backward began when it is complete (0.0 if it is not used)
    link: what an all-reduce costs
    kinds: gradients of different kinds (dtypes) never share a bucket; None: all are alike
    launch: seconds of the computing thread that each bucket costs, by which all later gradients are ready later
    Returns: the gradients' indices in the order in which they are ready, those of equal times from the last to the
    first, as backward makes them; `choose_buckets([4, 4, 4], [3, 2, 1], Link(alpha=0.0, beta=0.25)) == [[2], [1], [0]]`

    Exact for one kind: of all ways to cut the order into buckets none ends earlier by more than the tolerance (twice
    the tolerance, where the very best one has more than 400 buckets). With more kinds it is a heuristic: the order is
    cut as if all were alike, once at the latency of one bucket and once at that of one bucket a kind; each stretch
    becomes a bucket of each kind in it, those of the same kind are joined where that costs less than the tolerance, and
    the better plan is taken. The result depends on the arguments alone.
    """
    assert len(nbytes) == len(ready)
    assert kinds is None or len(kinds) == len(nbytes)
    assert all(0 <= seconds < float("inf") for seconds in (link.alpha, link.beta, launch, *ready))
    order = sorted(range(len(nbytes)), key=lambda index: (ready[index], -index))
    most = 1 if kinds is None else len(set(kinds))
    found = []
    for buckets in sorted({1, most}):
        alike = Link(alpha=buckets * link.alpha, beta=link.beta)
        bounds = _cut([nbytes[index] for index in order], [ready[index] for index in order], alike, buckets * launch)
        stretches = [order[start:stop] for start, stop in itertools.pairwise(bounds)]
        if kinds is None or most <= 1:
            return stretches
        loads = [_load(members, nbytes, ready) for each in stretches for members in _by_kind(each, kinds)]
        loads = _joined(loads, kinds, link, launch)
        found.append((_end(loads, link, launch), [load.members for load in loads]))
    limit = min(end for end, _ in found) * (1 + TOLERANCE)
    return min((plan for end, plan in found if end <= limit), key=len)


def split_large(plan: Sequence[Sequence[int]], nbytes: Sequence[int], link: Link) -> list[list[int]]:
    """The plan with buckets cut where a further one costs the wire no more than `_LATENCY` of its time.

    In the model of the cost such a cut changes next to nothing. On a real wire many small transfers follow each other
    more evenly than a few large ones do (benchmarks/overlap.py), and a smaller bucket can start earlier than was
    thought. Buckets keep their order, and gradients theirs in a bucket.
    `split_large([[0, 1, 2]], [4, 4, 4], Link(alpha=0.1, beta=1.0)) == [[0], [1], [2]]`
    """
    if link.beta == 0:
        return [list(members) for members in plan]
    enough = link.alpha / (_LATENCY * link.beta)
    pieces: list[list[int]] = []
    for members in plan:
        left = sum(nbytes[index] for index in members)
        piece: list[int] = []
        filled = 0
        for index in members:
            piece.append(index)
            filled += nbytes[index]
            left -= nbytes[index]
            if filled >= enough and left >= enough:
                pieces.append(piece)
                piece, filled = [], 0
        if piece:
            pieces.append(piece)
    return pieces


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The cost alpha + beta * n that fits measured all-reduces, alpha and beta at least 0.

    samples: (bytes, seconds), at least one; several of the same size count as one, the fastest: what disturbs a
    measurement makes it longer

    The line passes through the largest size, which is most like a bucket and, as it takes longest, is disturbed least;
    and through the smaller one that makes the sum of |log(line / measured)| over all sizes least. So latency shows
    though times differ a thousandfold, and no single one of the small sizes moves it. Where sizes do not tell latency
    from bandwidth (there is one only), all is bandwidth.
    """
    assert samples, "at least one all-reduce was measured"
    fastest: dict[int, float] = {}
    for size, seconds in samples:
        fastest[size] = min(seconds, fastest.get(size, seconds))
    points = [(size, max(seconds, _TICK)) for size, seconds in sorted(fastest.items())]
    *others, (largest, longest) = points
    lines = [(0.0, longest / largest)] if largest > 0 else []
    lines.append((longest, 0.0))
    for size, seconds in others:
        beta = (longest - seconds) / (largest - size)
        lines.append((seconds - beta * size, beta))

    def error(line: tuple[float, float]) -> float:
        return sum(abs(math.log(max(line[0] + line[1] * size, _TICK) / seconds)) for size, seconds in points)

    alpha, beta = min((line for line in lines if min(line) >= 0), key=error)
    return Link(alpha=alpha, beta=beta)


def _cut(nbytes: Sequence[int], ready: Sequence[float], link: Link, launch: float) -> list[int]:
    """Where to cut a sequence of gradients that become ready in this order: [0, ..., len(nbytes)].

    F(k, j) is when the first j gradients can be reduced in at most k buckets, S(j) their bytes:
        F(k, j) = min over i < j of max(F(k - 1, i), r(j) + launch * (k - 1)) + alpha + beta * (S(j) - S(i))
    The minimum needs no search. While F(k - 1, i) is no later than the gradient, the largest i is best. From there on
    F(k - 1, i) - beta * S(i) counts, which never falls with i: a plan without its last gradients ends earlier by at
    least the time of their bytes. So the minimum is at the largest i of the first sort, or at the one after it.
    """
    number = len(nbytes)
    sent = link.beta * np.concatenate(([0], np.cumsum(np.asarray(nbytes, np.int64))))
    arrive = np.asarray(ready, np.float64)
    stops = np.arange(1, number + 1)
    free = np.full(number + 1, np.inf)
    free[0] = 0.0
    ends: list[float] = []
    starts: list[
        npt.NDArray[np.int64]
    ] = []  # for k and j: where the last bucket starts, or -1: fewer buckets do as well
    for count in range(min(number, _MOST)):
        late = arrive + launch * count
        first = np.minimum(np.searchsorted(free, late, side="right"), stops) - 1
        waits = late - sent[first]  # for its gradients
        follows = np.where(first + 1 < stops, (free - sent)[first + 1], np.inf)  # upon the bucket before it
        end = np.minimum(waits, follows) + link.alpha + sent[1:]
        starts.append(np.where(end < free[1:], np.where(waits <= follows, first, first + 1), -1))
        if (starts[-1] < 0).all():
            break
        free[1:] = np.maximum.accumulate(np.minimum(free[1:], end))  # it rises, but for rounding
        ends.append(float(free[-1]))
    if not ends:
        return [0]
    count = next(count for count, end in enumerate(ends, 1) if end <= ends[-1] * (1 + TOLERANCE))
    bounds = [number]
    for layer in reversed(starts[:count]):
        if bounds[-1] > 0 and layer[bounds[-1] - 1] >= 0:
            bounds.append(int(layer[bounds[-1] - 1]))
    assert bounds[-1] == 0
    return bounds[::-1]


def _by_kind(members: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """A bucket for each kind, in the order in which they are complete."""
    buckets: dict[Hashable, list[int]] = {}
    for index in reversed(members):
        buckets.setdefault(kinds[index], []).append(index)
    return [bucket[::-1] for bucket in buckets.values()][::-1]


def _joined(loads: list[_Load], kinds: Sequence[Hashable], link: Link, launch: float) -> list[_Load]:
    """Puts each bucket into the next one of its kind, unless that ends later than the tolerance allows."""
    limit = _end(loads, link, launch) * (1 + TOLERANCE)
    for place in reversed(range(len(loads))):
        kind = kinds[loads[place].members[0]]
        alike = (later for later in range(place + 1, len(loads)) if kinds[loads[later].members[0]] == kind)
        if (later := next(alike, None)) is not None:
            both = loads[place] + loads[later]
            fewer = [*loads[:place], *loads[place + 1 : later], both, *loads[later + 1 :]]
            if _end(fewer, link, launch) <= limit:
                loads = fewer
    return loads


def _load(members: Sequence[int], nbytes: Sequence[int], ready: Sequence[float]) -> _Load:
    return _Load(
        members=list(members),
        ready=max(ready[index] for index in members),
        nbytes=sum(nbytes[index] for index in members),
    )


def _times(loads: Sequence[_Load], link: Link, launch: float) -> tuple[list[float], list[float]]:
    """When each bucket is launched, and when it is reduced."""
    launched, done = [], []
    last = free = 0.0
    for count, load in enumerate(loads):
        last = max(last, load.ready + launch * count)
        free = max(last, free) + link.alpha + link.beta * load.nbytes
        launched.append(last)
        done.append(free)
    return launched, done


def _end(loads: Sequence[_Load], link: Link, launch: float) -> float:
    return _times(loads, link, launch)[1][-1]
