"""Liveness: for how long nothing in a job has moved. Pure: heartbeats and times in, seconds out.

- A rank *waits* while its last collective is queued or running. It may then use a whole core, or print from another
  thread: neither is a sign of progress, because another rank must act.
- *Progress* is a collective begun or finished (also `collectives.init`), another step, a rank that starts or ends, and
  output of a rank that does not wait.
- *Activity* is progress, or CPU time (more than 1 % of a core) of a rank that does not wait, or of its descendants.

While some rank waits, only progress counts: a rank that is busy outside of the collective that the others wait in holds
them up. While no rank waits, activity counts: ranks may compute for hours without a collective. Activity also counts
while ranks wait in `collectives.init`: the others may prepare their data for hours before they join. While no rank has
called a collective or waits in `init`, nothing is known of what ranks wait for: then a job counts as hanging only if
all agents are silent. No job counts as hanging before all of its ranks have started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.protocol import Message

#: A rank is silent if its agent has sent nothing for longer than this (s). Agents send a heartbeat every second.
SILENCE = 5.0

# A rank is idle if it has used at most this fraction of a core, plus this burst (s), since its last activity. Its
# threads for samples and logs run even while its main thread sleeps.
_IDLE_FRACTION = 0.01
_IDLE_BURST = 0.05

#: The call of a rank that waits in `collectives.init`.
INIT = "collectives.init()"


@dataclass(kw_only=True)
class RankState:
    """A rank as it was last seen. All times are in s, on the job's clock.

    agent: pid of its agent; now: the time of this state; heard_at: when its agent last sent output or a heartbeat
    state: of its process, as in /proc ("R", "S", "D", "T", "Z"); "?" before the first heartbeat
    calls: number of collectives begun
    call: the last collective, None before the first; INIT while the rank waits there and `joining` is True
    on: the communicator of that call
    call_state: "queued", "started", "done" or "failed"; call_at: when the call got this state
    where: the position of its Python code, None if unknown; where_at: when that was seen
    cpu: fraction of a core that it used between the last two heartbeats, None if unknown
    beat_at: time of the last heartbeat; cpu_seconds: the CPU time that it reported
    active_at: time of the last activity; active_seconds: CPU time of the rank and its descendants until then
    """

    rank: int
    pid: int
    agent: int
    host: str
    now: float
    heard_at: float
    state: str = "?"
    calls: int = 0
    call: str | None = None
    on: str | None = None
    call_state: str | None = None
    call_at: float = 0.0
    joining: bool = False
    step: int | None = None
    where: str | None = None
    where_at: float = 0.0
    cpu: float | None = None
    beat_at: float | None = None
    cpu_seconds: float = 0.0
    active_at: float = 0.0
    active_seconds: float = 0.0

    @property
    def silence(self) -> float:
        return self.now - self.heard_at

    @property
    def silent(self) -> bool:
        return self.silence > SILENCE

    @property
    def stopped(self) -> bool:
        return self.state == "T"

    @property
    def unresponsive(self) -> bool:
        return self.stopped or self.silent

    @property
    def waits(self) -> bool:
        return self.call_state in ("queued", "started")

    @property
    def call_age(self) -> float:
        return self.now - self.call_at

    @property
    def where_age(self) -> float:
        return self.now - self.where_at


class Liveness:
    """Follows a job of `n` ranks."""

    def __init__(self, n: int, now: float = 0.0) -> None:
        self._missing = n
        self._ranks: dict[int, RankState] = {}
        self._progress_at = now  # Time of the last progress.
        self._active_at = now  # When a rank that does not wait, or its descendants, last used CPU time.

    def rank_started(self, rank: int, hello: Message, now: float) -> None:
        """Called when a rank has started."""
        self._missing -= 1
        self._ranks[rank] = RankState(
            rank=rank,
            pid=int(hello["pid"]),
            agent=int(hello["agent"]),
            host=str(hello.get("host", "")),
            now=now,
            heard_at=now,
            active_at=now,
        )
        self._progress_at = now

    def rank_ended(self, rank: int, now: float) -> None:
        """Called when a rank has ended."""
        if self._ranks.pop(rank, None) is not None:
            self._progress_at = now

    def joining(self, rank: int, waits: bool, now: float) -> None:
        """Called when a rank begins to wait in `collectives.init`, or no longer waits there."""
        if (state := self._ranks.get(rank)) is not None:
            state.joining = waits
            state.call = INIT if waits else None
            state.call_state = "started" if waits else None
            state.call_at = now
            self._progress_at = now

    def output(self, rank: int, now: float) -> None:
        """Called when a rank has written something."""
        if (state := self._ranks.get(rank)) is not None:
            state.heard_at = now
            if not state.waits:
                self._progress_at = now

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        """Called when a rank's agent has sent a heartbeat."""
        state = self._ranks.get(rank)
        if state is None:
            return
        progress = _update(state, beat, now)
        if progress:
            self._progress_at = now
        cpu_seconds = state.cpu_seconds + float(beat.get("below") or 0.0)
        used = cpu_seconds - state.active_seconds
        active = not state.waits and used > _IDLE_BURST + _IDLE_FRACTION * (now - state.active_at)
        if active:
            self._active_at = now
        # If a child process ends and the rank does not wait for it, its CPU time is lost: `used` is negative.
        if active or progress or used < 0.0:
            state.active_at = now
            state.active_seconds = cpu_seconds

    def quiet(self, now: float) -> float:
        """For how many seconds nothing has moved; 0.0 before all ranks have started, and if none runs.

        If no rank has called a collective or waits in `collectives.init`: seconds since an agent last sent anything, or
        0.0 if that is at most SILENCE.
        """
        states = self._ranks.values()
        if self._missing > 0 or not states:
            return 0.0
        if any(state.waits and not state.joining for state in states):
            return now - self._progress_at
        if any(state.calls or state.waits for state in states):
            return now - max(self._progress_at, self._active_at)
        latest = max(state.heard_at for state in states)
        return now - latest if now - latest > SILENCE else 0.0

    def ranks(self, now: float) -> list[RankState]:
        """The states of the running ranks, sorted by rank. now: the time of these states"""
        return [replace(state, now=now) for _, state in sorted(self._ranks.items())]


def _update(state: RankState, beat: Message, now: float) -> bool:
    """Copies a heartbeat into the state of its rank. Returns: whether the rank has made progress."""

    def progress() -> tuple[Any, ...]:
        return state.calls, state.call, state.call_state, state.step

    before = progress()
    cpu_seconds = float(beat.get("cpu") or 0.0)
    # After the launcher was held up, several heartbeats arrive at once: no rate can be computed from these.
    if state.beat_at is not None and now - state.beat_at >= 0.2:
        state.cpu = max(0.0, cpu_seconds - state.cpu_seconds) / (now - state.beat_at)
    state.heard_at = state.beat_at = now
    state.cpu_seconds = cpu_seconds
    state.state = str(beat.get("state") or "?")
    state.calls = int(beat.get("calls") or 0)
    state.step = beat.get("step")
    state.where = beat.get("where")
    state.where_at = now - float(beat.get("where_age") or 0.0)
    if not state.joining:
        state.call = beat.get("call")
        state.call_state = beat.get("call_state")
        state.on = beat.get("call_on")
        state.call_at = now - float(beat.get("call_age") or 0.0)
    return progress() != before
