"""Liveness: for how long nothing in a job has moved. Pure: heartbeats and times in, seconds out.

- A rank *waits* while its last collective is queued or running. It may use a whole core for that, or print from another
  thread: neither is a sign of progress, because it is another rank's turn.
- *Progress* is a collective begun or finished, another step, a rank that starts or ends, and output of a rank that
  does not wait.
- *Activity* is progress, or CPU time (at least 1 % of a core) of a rank that does not wait, or of its child processes.

While some rank waits, only progress counts: a rank that spins outside of the collective that the others wait in is what
holds them up, however busy it is. While no rank waits, activity counts: ranks may compute for hours without a
collective. Activity counts, too, while ranks wait in `collectives.init`: others may prepare their data for long before
they come. Ranks that never made a collective, and wait in no `init`, form no world, and what they wait for is unknown;
they count as hanging only if none of their agents sends anything. The detector waits until all ranks have started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.protocol import Message

#: A rank whose agent sends no heartbeat for so long (s), though one is due every second, is silent.
SILENCE = 5.0

# Where the main thread sleeps, the threads that sample it and that log something still take a little.
_IDLE_SHARE = 0.01  # of a core, on average since the last sign of activity
_IDLE_BURST = 0.05  # s of CPU

#: The call in which a rank waits that has not joined the world yet.
INIT = "collectives.init()"


@dataclass(kw_only=True)
class RankState:
    """A rank as it was last seen. All times are in s, on one clock that stands still whenever the job does.

    agent: pid of its agent; now: when it is looked at; heard_at: when its agent last sent something
    state: of the process, as /proc has it ("R", "S", "D", "T", "Z"); "?" before the first heartbeat
    calls: collectives begun; call: the last of them, on communicator `on`; call_state: "queued", "started", "done" or
    "failed", since call_at; None if there was none; joining: it waits in `collectives.init`, which `call` says then
    where, where_at: where its Python stood, and when that was seen; None if that is not known
    cpu: share of a core in use at last, None if not known
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
    beat_at: float | None = None  # the last heartbeat, and the CPU seconds in it
    cpu_seconds: float = 0.0
    active_at: float = 0.0  # the last sign of activity, and the CPU seconds then, with those of child processes
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

    def __init__(self, n: int, at: float = 0.0) -> None:
        self._missing = n
        self._ranks: dict[int, RankState] = {}
        self._progress_at = at  # the last of each
        self._active_at = at

    def rank_started(self, rank: int, hello: Message, at: float) -> None:
        """A rank has started."""
        self._missing -= 1
        pid, agent, host = int(hello["pid"]), int(hello["agent"]), str(hello.get("host", ""))
        self._ranks[rank] = RankState(rank=rank, pid=pid, agent=agent, host=host, now=at, heard_at=at, active_at=at)
        self._progress_at = at

    def rank_ended(self, rank: int, at: float) -> None:
        """A rank has ended."""
        if self._ranks.pop(rank, None) is not None:
            self._progress_at = at

    def joining(self, rank: int, waits: bool, at: float) -> None:
        """A rank waits in `collectives.init` from now on, or no longer."""
        if (state := self._ranks.get(rank)) is not None:
            call = (INIT, "started") if waits else (None, None)
            state.joining, (state.call, state.call_state), state.call_at = waits, call, at
            self._progress_at = at

    def output(self, rank: int, at: float) -> None:
        """A rank has written something."""
        if (state := self._ranks.get(rank)) is not None:
            state.heard_at = at
            if not state.waits:
                self._progress_at = at

    def heartbeat(self, rank: int, beat: Message, at: float) -> None:
        """A heartbeat of a rank's agent has come."""
        state = self._ranks.get(rank)
        if state is None:
            return
        progress = _update(state, beat, at)
        if progress:
            self._progress_at = at
        used = state.cpu_seconds + float(beat.get("below") or 0.0)
        grown = used - state.active_seconds
        active = not state.waits and grown > _IDLE_BURST + _IDLE_SHARE * (at - state.active_at)
        if active:
            self._active_at = at
        # It shrinks when a child that nothing waited for has ended, and its CPU time has gone with it.
        if active or progress or grown < 0.0:
            state.active_at, state.active_seconds = at, used

    def quiet(self, at: float) -> float:
        """For how many seconds nothing has moved; 0.0 before all ranks have started."""
        states = self._ranks.values()
        if self._missing > 0 or not states:
            return 0.0
        if any(state.waits and not state.joining for state in states):
            return at - self._progress_at
        if any(state.calls or state.waits for state in states):
            return at - max(self._progress_at, self._active_at)
        latest = max(state.heard_at for state in states)
        return at - latest if at - latest > SILENCE else 0.0

    def ranks(self, at: float) -> list[RankState]:
        """The ranks that run, in order, as they are at this moment."""
        return [replace(state, now=at) for _, state in sorted(self._ranks.items())]


def _update(state: RankState, beat: Message, at: float) -> bool:
    """Takes over what a heartbeat says of a rank; returns whether the rank has made progress since the last one."""

    def progress() -> tuple[Any, ...]:
        return state.calls, state.call, state.call_state, state.step

    before = progress()
    cpu = float(beat.get("cpu") or 0.0)
    # Beats that come at once, after the launcher was held up, say nothing about a rate.
    if state.beat_at is not None and at - state.beat_at >= 0.2:
        state.cpu = max(0.0, cpu - state.cpu_seconds) / (at - state.beat_at)
    state.heard_at = state.beat_at = at
    state.cpu_seconds = cpu
    state.state, state.calls, state.step = str(beat.get("state") or "?"), int(beat.get("calls") or 0), beat.get("step")
    state.where, state.where_at = beat.get("where"), at - float(beat.get("where_age") or 0.0)
    if not state.joining:
        state.call, state.call_state, state.on = beat.get("call"), beat.get("call_state"), beat.get("call_on")
        state.call_at = at - float(beat.get("call_age") or 0.0)
    return progress() != before
