"""Statistics of training: where the time of a step goes, and which rank the others wait for.

`Timeline` records the steps of one model, `Stats` summarizes the latest of them. An all-reduce ends at nearly the same
moment on every rank, however late one of them started. So only the times at which ranks *arrived* show which one was
waited for. Ranks send these times with the control message of the next step, a row of nanoseconds for each rank:

    forward begun (0: there was none) | backward begun | control message done | last bucket complete

All times are host times: on a GPU, when the host launched the work, not when the device did it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.errors import align_columns
from collectives.flight.recorder import process_recorder
from ddp.cuda.memory import memory_reserved
from ddp.parallel import step_trace
from ddp.parallel.buckets import Buckets
from ddp.parallel.step_trace import Step

Array = np.ndarray[Any, Any]
_FORWARD, _BEGUN, _DONE, _COMPLETE = range(4)
_WIDTH = 4
# A timeline keeps at most `_KEPT` steps, the latest ones, and at most `_FLOATS` timestamps of all ranks in them
# (8 MiB), but at least 16 steps.
_KEPT = 1000
_FLOATS = 1 << 20
# Clock offsets are estimated from this many of the latest control messages.
_MESSAGES = 64
# A rank that is late by less than this fraction of a step was not waited for.
_NOTICED = 0.01
# Milliseconds in a nanosecond.
_MS = 1e-6
_MIB = 1 << 20
_MOMENTS = ("ready", "launched", "done", "exposed")
_LABELS = {
    "step": "step, from end to end",
    "forward": "  forward",
    "backward": "  backward, computing",
    "exposed": "  waiting for communication (exposed)",
    "other": "  other: data, loss, optimizer, logging",
    "communication": "communication under way",
    "hidden": "  hidden behind backward",
}
_PARTS = {
    "before": "before forward (data, optimizer or logging)",
    "forward": "in forward or the loss",
    "backward": "in backward",
}


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """The statistics of one bucket. names: of its parameters; mib: its size in MiB.

    ready, launched, done: milliseconds after backward began, mean over the steps
    exposed: milliseconds of waiting for this bucket, mean over the steps. The wait begins when backward has computed
    everything and the buckets before this one are reduced

    If the exchange does not record times, launched, done and exposed are None.
    """

    names: tuple[str, ...]
    mib: float
    ready: float
    launched: float | None
    done: float | None
    exposed: float | None


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """How often the other ranks waited for one rank, because its last gradient was complete after theirs, and how long.

    steps: the number of steps in which they waited; a wait of less than 1 % of a step is not counted
    late: milliseconds after the median of the other ranks, mean over these steps; 0.0 if there were none
    before, forward, backward: the parts of `late` lost before forward (data, optimizer, logging), in forward and loss,
    and in backward
    """

    steps: int
    late: float
    before: float
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The steps of one period, on one rank. Times are host times in milliseconds, means over the steps.

    rank, size: this rank, and the number of ranks; steps: how many synchronized backwards are counted, at most 1,000
    step: from the end of one backward to the end of the next. `step` and `other` are None with fewer than two steps
    forward: the last forward before each backward; None if the model was not called
    backward: from its begin until its last node has run
    communication: time in which some bucket was launched and not yet reduced: it was being sent, or waited for a rank
    hidden: the part of `communication` in which backward computed; both are None if no times were recorded
    exposed: time from the last node of backward until all buckets were reduced
    other: the rest of a step: data, loss, optimizer, logging
    buckets: of the latest plan, in launch order
    compared: in how many steps the arrival of all ranks is known, 0 for one rank; lateness: of each rank
    """

    rank: int
    size: int
    steps: int
    step: float | None
    forward: float | None
    backward: float | None
    communication: float | None
    hidden: float | None
    exposed: float | None
    other: float | None
    buckets: tuple[BucketStats, ...]
    compared: int
    lateness: tuple[Lateness, ...]

    @classmethod
    def of(cls, steps: Sequence[Step], rank: int, size: int, offsets: Array) -> Stats:
        """The statistics of these steps. offsets: (size,) nanoseconds that each rank's clock is ahead of rank 0's"""
        compared, lateness = _lateness(steps, size, offsets)
        columns = [_parts(step) for step in steps]
        return cls(
            rank=rank,
            size=size,
            steps=len(steps),
            buckets=_buckets(steps),
            compared=compared,
            lateness=lateness,
            **{name: _mean([column[name] for column in columns]) for name in _LABELS},
        )

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that was hidden behind backward, 0 to 1; None if no communication is known."""
        return self.hidden / self.communication if self.communication and self.hidden is not None else None

    def summary(self) -> str:
        """The statistics in one line.

        `200 steps of 45.2 ms: forward 12.1, backward 24.0, exposed communication 3.1 (of 18.4, 83 % hidden), ...`
        """
        if self.steps == 0:
            return "no step"
        parts = []
        for name in ("forward", "backward", "exposed", "other"):
            mean: float | None = getattr(self, name)
            if mean is None or (name == "exposed" and self.size == 1):
                continue
            parts.append(f"{'exposed communication' if name == 'exposed' else name} {mean:.1f}")
            if name == "exposed" and self.hidden_share is not None:
                parts[-1] += f" (of {self.communication:.1f}, {100 * self.hidden_share:.0f} % hidden)"
        length = "" if self.step is None else f" of {self.step:.1f} ms"
        line = f"{self._count()}{length}: {', '.join(parts)} ms"
        return line if self.size == 1 else f"{line}; {self.waited_for()}"

    def waited_for(self) -> str:
        """One sentence: which rank was waited for, and where it lost the time."""
        if self.compared == 0:
            return "nothing is known yet of when the other ranks arrived"
        lost = [lateness.steps * lateness.late for lateness in self.lateness]
        if not any(lateness.steps for lateness in self.lateness):
            return "no rank was waited for: they arrived together"
        worst = max(range(self.size), key=lost.__getitem__)
        late = self.lateness[worst]
        # By chance alone, one of two ranks is last in half of all steps. So with few ranks the threshold is higher.
        if lost[worst] >= (1 + 1 / self.size) / 2 * sum(lost) and late.steps >= 0.1 * self.compared:
            part = max(_PARTS, key=lambda name: float(getattr(late, name)))
            return (
                f"rank {worst} was waited for in {100 * late.steps / self.compared:.0f} % of steps, {late.late:.1f} ms "
                f"on average, lost most of all {_PARTS[part]}"
            )
        return f"no rank stands out: waited {sum(lost) / self.compared:.1f} ms a step for one or another"

    def _count(self) -> str:
        return f"{self.steps} step{'' if self.steps == 1 else 's'}"

    def __str__(self) -> str:
        if not self.steps:
            return f"rank {self.rank} of {self.size}, no step yet"
        lines = [f"rank {self.rank} of {self.size}, {self._count()}; host times in ms, the mean over steps", ""]
        parts = {label: getattr(self, name) for name, label in _LABELS.items()}
        lines += align_columns([(label, f"{mean:.2f}") for label, mean in parts.items() if mean is not None], right=[1])
        table = [["bucket", "MiB", *_MOMENTS, "parameters; times after backward began"]]
        for number, bucket in enumerate(self.buckets):
            names = bucket.names if len(bucket.names) == 1 else (bucket.names[0], "...", bucket.names[-1])
            values = [getattr(bucket, moment) for moment in ("mib", *_MOMENTS)]
            cells = ["-" if value is None else f"{value:.2f}" for value in values]
            table.append([str(number), *cells, " ".join(names)])
        if self.buckets:
            lines += ["", *align_columns(table, right=range(len(table[0]) - 1))]
        return "\n".join([*lines, "", self.waited_for()] if self.size > 1 else lines)


class ClockOffsets:
    """The differences between the ranks' clocks and rank 0's, measured by the control messages.

    All processes of a node share the clock `time.monotonic_ns()`, which began when the node was started. An all-reduce
    ends at nearly the same moment everywhere. So the offset of a node is the median, over the last 64 control messages,
    of (done on this node - done on rank 0's node). A message is done on a node when the first rank there is done. The
    error is a few tenths of a millisecond over TCP, as ranks do not notice the end of a message equally soon.

    nodes: the node of each rank, in rank order
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = np.unique(np.asarray(nodes), return_inverse=True)[1].reshape(-1)
        self._count = int(self._nodes.max()) + 1
        self._messages: deque[Array] = deque(maxlen=_MESSAGES)

    def receive(self, table: Array) -> None:
        """Records the timestamps of a control message. table: (size, _WIDTH)"""
        if self._count > 1 and table[:, _DONE].all():
            done = np.array([table[self._nodes == node, _DONE].min() for node in range(self._count)])
            self._messages.append(done - done[self._nodes[0]])

    def offsets(self) -> Array:
        """(size,) nanoseconds that each rank's clock is ahead of rank 0's; 0 where nothing is known yet."""
        if not self._messages:
            return np.zeros(len(self._nodes))
        medians: Array = np.median(np.array(self._messages), axis=0)
        return medians[self._nodes]


class Timeline:
    """The steps of one model on this rank, with the timestamps of all ranks from the control messages.

    rank, size: this rank, and the number of ranks; nodes: the node of each rank, in rank order
    job: a number that identifies the job on all its ranks
    width: timestamps of each rank in a control message; steps: the latest ones, since the last `summary`

    For each backward the reducer sends `timestamps` in the control message, passes all ranks' timestamps to `receive`,
    and the step to `add`. These two methods also add to the figures in the flight record, which ddp-top and the metrics
    show while the job runs.
    """

    width = _WIDTH

    def __init__(self, rank: int, size: int, nodes: Sequence[int], job: int) -> None:
        assert len(nodes) == size
        self.rank = rank
        self.size = size
        self.job = job
        self.steps: deque[Step] = deque(maxlen=min(_KEPT, max(16, _FLOATS // (size * _WIDTH))))
        self._clocks = ClockOffsets(nodes)
        self._contents: Any = ()
        self._latest: Step | None = None
        self._sent: Step | None = None  # the step whose timestamps are in the control message that is in flight
        self._ended = 0
        step_trace.register(self)

    def set_buckets(self, buckets: Buckets) -> None:
        """Sets the names and sizes of the buckets of later backwards."""
        names = (tuple(buckets.names[index] for index in members) for members in buckets.members)
        self._contents = tuple(zip(names, (int(buffer.nbytes) for buffer in buckets.memory.buffers), strict=True))

    def timestamps(self) -> Array:
        """(width,) this rank's timestamps of its last step, for the next control message; 0 where there is none."""
        step = self._sent = self._latest
        if step is None:
            return np.zeros(_WIDTH)
        forward = 0 if step.forward is None else step.forward[0]
        done = 0 if step.control is None else step.control[1]
        return np.array([forward, step.begun, done, max(step.ready, default=0)], float)

    def receive(self, table: Array) -> None:
        """Called when the control message has arrived. table: (size, width) all ranks' timestamps"""
        if self._sent is not None:
            self._sent.table = table.copy()  # the message is used again for the next backward
            self._clocks.receive(self._sent.table)
            self._sent = None
            if table[:, _COMPLETE].all():
                arrived = (table[:, _COMPLETE] - self._clocks.offsets()).tolist()
                ordered = sorted(arrived)
                # The other ranks waited for this one. Their waiting time is counted from their median arrival.
                if arrived[self.rank] == ordered[-1]:
                    process_recorder().add("waited", (ordered[-1] - ordered[(self.size - 2) // 2]) / 1e9)

    def add(self, step: Step) -> None:
        """Records a synchronized backward that has ended."""
        step.contents = self._contents
        step.since = self._ended
        self.steps.append(step)
        self._latest = step
        self._ended = step.ended
        step_trace.record(self, step)
        recorder = process_recorder()
        if self.size > 1:
            recorder.add("exposed", (step.ended - step.computed) / 1e9)
            recorder.add("reduced_bytes", sum(nbytes for _, nbytes in step.contents))
        if "cupy" in sys.modules:
            recorder.set("device_bytes", memory_reserved())

    def offset(self) -> int:
        """Nanoseconds that this rank's clock is ahead of rank 0's; 0 if nothing is known yet."""
        return int(self._clocks.offsets()[self.rank])

    def stats(self) -> Stats:
        """Statistics of the steps since the last `summary`, of the latest ones if there were many. Not collective."""
        return Stats.of(self.steps, self.rank, self.size, self._clocks.offsets())

    def summary(self) -> str:
        """Returns the statistics in one line, and begins a new period, so that pauses between epochs are not counted.

        Not collective.
        """
        line = self.stats().summary()
        self.steps.clear()
        self._ended = 0
        return line


def _parts(step: Step) -> dict[str, float]:
    """The parts of a step in nanoseconds, nan for what is not known."""
    communication, hidden = step.communication() or (np.nan, np.nan)
    forward = np.nan if step.forward is None else step.forward[1] - step.forward[0]
    length = step.ended - step.since if step.since else np.nan
    return {
        "step": length,
        "forward": forward,
        "backward": step.computed - step.begun,
        "exposed": step.ended - step.computed,
        "other": length - float(np.nan_to_num(forward)) - (step.ended - step.begun),
        "communication": communication,
        "hidden": hidden,
    }


def _mean(nanoseconds: Sequence[float]) -> float | None:
    """The mean in milliseconds of the values that are not nan; None if there are none."""
    known = [value for value in nanoseconds if not np.isnan(value)]
    return float(np.mean(known)) * _MS if known else None


def _buckets(steps: Sequence[Step]) -> tuple[BucketStats, ...]:
    """The statistics of each bucket, over the steps that had the latest plan."""
    contents = steps[-1].contents if steps else ()
    steps = [step for step in steps if step.contents is contents]
    buckets = []
    for bucket, (names, nbytes) in enumerate(contents):
        columns = zip(*(_moments(step, bucket) for step in steps), strict=True)
        means: dict[str, Any] = dict(zip(_MOMENTS, map(_mean, columns), strict=True))
        buckets.append(BucketStats(names=names, mib=nbytes / _MIB, **means))
    return tuple(buckets)


def _moments(step: Step, bucket: int) -> tuple[float, float, float, float]:
    """The times named in `_MOMENTS`, in nanoseconds after backward began; nan for what is not known."""
    ready = step.ready[bucket] - step.begun
    times = step.times[bucket]
    if times is None:
        return ready, np.nan, np.nan, np.nan
    before = max([step.computed, *(span[1] for span in step.times[:bucket] if span is not None)])
    return ready, times[0] - step.begun, times[1] - step.begun, max(0, times[1] - before)


def _lateness(steps: Sequence[Step], size: int, offsets: Array) -> tuple[int, tuple[Lateness, ...]]:
    """The number of steps with timestamps of all ranks, and the lateness of each rank in these.

    The lateness of the last rank is measured from the median of the others, at three moments: when forward began, when
    backward began, and when the last gradient was complete. The differences show where the time was lost.
    """
    known = [step for step in steps if step.table is not None and step.table[:, [_BEGUN, _COMPLETE]].all()]
    if size == 1 or not known:
        return 0, (Lateness(steps=0, late=0.0, before=0.0, forward=0.0, backward=0.0),) * size
    forward, begun, _, complete = np.moveaxis(np.array([step.table for step in known]), 2, 0)
    # (3, n, size), on one clock. Without a forward, all time before backward counts as lost before forward.
    moments = np.stack([np.where(forward == 0, begun, forward), begun, complete]) - offsets
    last = moments[2].argmax(axis=1)
    others = np.arange(size) != last[:, None]
    late = moments[:, ~others] - np.median(moments[:, others].reshape(3, -1, size - 1), axis=2)
    lost = np.diff(late, axis=0, prepend=0)
    lengths = np.array([step.ended - (step.since or step.begun) for step in known])
    by_rank = []
    for rank in range(size):
        losses = lost[:, (last == rank) & (late[2] > _NOTICED * lengths)] * _MS
        parts = losses.mean(axis=1).tolist() if losses.size else [0.0] * 3
        by_rank.append(Lateness(steps=losses.shape[1], late=sum(parts), **dict(zip(_PARTS, parts, strict=True))))
    return len(known), tuple(by_rank)
