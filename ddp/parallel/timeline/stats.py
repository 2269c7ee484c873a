"""What a period of training spent its time on, and which rank was waited for: numbers, a table, a sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ddp.parallel.timeline.lateness import PARTS
from ddp.parallel.timeline.sums import MOMENTS, QUANTITIES, Sums

_MS = 1e-6  # milliseconds in a nanosecond
_MIB = 1 << 20
_LISTED = 8  # ranks
_LABELS = {
    "step": "step, from end to end",
    "forward": "  forward",
    "backward": "  backward, computing",
    "exposed": "  waiting for communication (exposed)",
    "behind": "    of that, for a rank that was late",
    "other": "  other: data, loss, optimizer, logging",
    "communication": "communication under way",
    "hidden": "  hidden behind backward",
}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Milliseconds a step. mean: over all steps counted, so that means of parts add up; median: of the latest 4096."""

    mean: float
    median: float


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket. names: of its parameters; mib: its size in MiB.

    ready, launched, done: milliseconds after backward began, mean over the steps; launched and done are None if the
    exchange does not tell. exposed: milliseconds that backward, having computed everything, waited for it
    """

    names: tuple[str, ...]
    mib: float
    ready: float
    launched: float | None
    done: float | None
    exposed: float | None


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """How one rank was waited for: because it arrived last at the bucket that decided when the step ended.

    steps: in how many steps, those left out in which it came less than 1 % of the step after the others
    late: milliseconds, the mean over these steps, after the median of the other ranks; 0.0 if there were none
    before, forward, backward: where it had lost them: before forward (data, optimizer, logging), in forward and loss,
    in backward
    """

    steps: int
    late: float
    before: float
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The steps of one period, on one rank. All times are host times in milliseconds.

    rank, size: whose, and of how many; steps: synchronized backwards that were counted
    step: from the end of one backward to that of the next; None before there are two; so is other
    forward: the last forward before each backward; None if the model was not called
    backward: until its last node had run
    communication: some bucket was launched and not done, be it on the wire or waiting for a rank; hidden: the part of
    it in which backward computed; both None if the exchange does not tell
    exposed: what backward, having computed everything, waited for the buckets; behind: the part of it in which another
    rank had not yet come to the last bucket, so that no faster wire would help
    other: what is left of a step: data, loss, optimizer, logging
    buckets: of the plan in force, in launch order; None, not a number, where something is not known
    heard: steps of which it is known when all ranks arrived; lateness: of each rank
    """

    rank: int
    size: int
    steps: int
    step: Spread | None
    forward: Spread | None
    backward: Spread | None
    communication: Spread | None
    hidden: Spread | None
    exposed: Spread | None
    behind: Spread | None
    other: Spread | None
    buckets: tuple[BucketStats, ...]
    heard: int
    lateness: tuple[Lateness, ...]

    @classmethod
    def of(cls, sums: Sums, rank: int, size: int) -> Stats:
        """The sums, divided."""
        spreads = {name: _spread(sums, place) for place, name in enumerate(QUANTITIES)}
        return cls(
            rank=rank,
            size=size,
            steps=sums.steps,
            buckets=_buckets(sums),
            heard=sums.heard,
            lateness=tuple(_lateness(sums, each) for each in range(size)),
            **spreads,
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers, strings and None, for `json.dumps`."""
        found = asdict(self)
        found["buckets"] = [{**bucket, "names": list(bucket["names"])} for bucket in found["buckets"]]
        found["lateness"] = list(found["lateness"])
        return found

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that was hidden behind backward, 0 to 1; None if there was none."""
        if self.communication is None or self.hidden is None or not self.communication.mean > 0:
            return None
        return self.hidden.mean / self.communication.mean

    def waited_for(self) -> str:
        """One sentence: which rank was waited for, and why."""
        if self.size == 1:
            return "there is one rank, which waits for nobody"
        if self.heard == 0:
            return "nothing is known yet of when the other ranks arrived"
        lost = [each.steps * each.late for each in self.lateness]
        mean = sum(lost) / self.heard
        if not any(each.steps for each in self.lateness):
            return "no rank was waited for: they arrived together"
        worst = max(range(self.size), key=lost.__getitem__)
        # One of two ranks is last in half of all steps by chance alone.
        if lost[worst] >= (1 + 1 / self.size) / 2 * sum(lost) and self.lateness[worst].steps >= 0.1 * self.heard:
            late = self.lateness[worst]
            return (
                f"rank {worst} was waited for in {_percent(late.steps / self.heard)} of steps, {late.late:.1f} ms on "
                f"average: {_why(late)}"
            )
        order = sorted(range(self.size), key=lambda rank: -self.lateness[rank].steps)[:3]
        shares = ", ".join(f"rank {rank} in {_percent(self.lateness[rank].steps / self.heard)}" for rank in order)
        return f"no rank stands out: waited {mean:.1f} ms a step for one or another ({shares} of steps)"

    def _late_ranks(self) -> list[int]:
        """Those worth a line: all, or of many those that were waited for most."""
        most = sorted(range(self.size), key=lambda rank: -self.lateness[rank].steps)[:_LISTED]
        return sorted(rank for rank in most if self.size <= _LISTED or self.lateness[rank].steps)

    def __str__(self) -> str:
        if not self.steps:
            return f"rank {self.rank} of {self.size}, no step yet"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        lines = [f"rank {self.rank} of {self.size}, {steps}; host times in ms", ""]
        lines.append(f"{'':<40}{'mean':>9}{'median':>9}")
        for name, label in _LABELS.items():
            spread: Spread | None = getattr(self, name)
            if spread is not None:
                lines.append(f"{label:<40}{spread.mean:>9.2f}{spread.median:>9.2f}")
        if self.hidden_share is not None:
            lines[-1] += f"   {_percent(self.hidden_share)} of it"
        elif self.size > 1:
            lines.append("communication: not known, for this exchange does not tell when buckets were done")
        if self.buckets:
            heads = "".join(f"{head:>9}" for head in ("MiB", *MOMENTS))
            lines += ["", f"bucket{heads}  parameters; times after backward began"]
            lines += [f"{number:>6}{_row(bucket)}" for number, bucket in enumerate(self.buckets)]
        if self.heard:
            heads = "".join(f"{head:>9}" for head in ("ms late", *PARTS))
            lines += ["", f"rank  waited for in{heads}  where it lost the time"]
            for rank in self._late_ranks():
                late = self.lateness[rank]
                cells = "".join(f"{cell:>9.2f}" for cell in (late.late, late.before, late.forward, late.backward))
                lines.append(f"{rank:>4}{_percent(late.steps / self.heard):>15}{cells if late.steps else ''}")
        return "\n".join([*lines, "", self.waited_for()])


def _spread(sums: Sums, place: int) -> Spread | None:
    if not sums.count[place]:
        return None
    mean = sums.total[place] / sums.count[place]
    latest = [row[place] for row in sums.rows if not np.isnan(row[place])]
    return Spread(mean=_ms(mean), median=_ms(np.median(latest) if latest else mean))


def _buckets(sums: Sums) -> tuple[BucketStats, ...]:
    found = []
    for number, (names, nbytes) in enumerate(zip(sums.contents.names, sums.contents.nbytes, strict=True)):
        totals, counts = sums.moments[number], sums.moments_count[number]
        means = [_ms(total / count) if count else None for total, count in zip(totals, counts, strict=True)]
        moments = dict(zip(MOMENTS, means, strict=True))
        found.append(BucketStats(names=names, mib=nbytes / _MIB, **moments))  # type: ignore[arg-type]  # ready is known
    return tuple(found)


def _lateness(sums: Sums, rank: int) -> Lateness:
    steps = int(sums.last[rank])
    lost = [_ms(part / steps) if steps else 0.0 for part in sums.lost[rank]]
    return Lateness(steps=steps, late=sum(lost), **dict(zip(PARTS, lost, strict=True)))


def _why(late: Lateness) -> str:
    """Where it lost the time, the largest part first; what is less than a tenth of it is not worth a word."""
    words = (
        (late.before, "{:.1f} ms late already when forward began (data, optimizer or logging)"),
        (late.forward, "{:.1f} ms lost in forward"),
        (late.backward, "{:.1f} ms lost in backward"),
    )
    worth = [(lost, text) for lost, text in words if lost >= 0.1 * late.late]
    return ", ".join(text.format(lost) for lost, text in sorted(worth, key=lambda each: -each[0]))


def _row(bucket: BucketStats) -> str:
    cells = [bucket.mib, bucket.ready, bucket.launched, bucket.done, bucket.exposed]
    names = bucket.names
    listed = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    return "".join("        -" if cell is None else f"{cell:>9.2f}" for cell in cells) + f"  {listed}"


def _ms(nanoseconds: Any) -> float:
    return float(nanoseconds) * _MS


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
