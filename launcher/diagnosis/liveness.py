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

from typing import NamedTuple

from launcher.protocol import Message

#: A rank whose agent sends no heartbeat for so long (s), though one is due every second, is silent.
SILENCE = 5.0

# Where the main thread sleeps, the threads that sample it and that log something still take a little.
_IDLE_SHARE = 0.01  # of a core, on average since the last sign of activity
_IDLE_BURST = 0.05  # s of CPU

#: The call in which a rank waits that has not joined the world yet.
INIT = "collectives.init()"


class RankSnapshot(NamedTuple):
    """A rank as it was last seen. Ages are in s.

    agent: pid of its agent
    state: of the process, as /proc has it ("R", "S", "D", "T", "Z"); "?" before the first heartbeat
    calls: collectives begun; call: the last of them, on communicator `on`; call_state: "queued", "started", "done",
    "failed", and for how long it is that; None if there was none
    where, where_age: where its Python stood, and when that was seen; None if that is not known
    cpu: share of a core in use at last, None if not known; ran: share of its beats since its last progress in which it
    was running, or wanted to; silence: since the last message of its agent
    """

    rank: int
    pid: int
    agent: int
    host: str
    state: str
    calls: int
    call: str | None
    on: str | None
    call_state: str | None
    call_age: float
    where: str | None
    where_age: float
    cpu: float | None
    ran: float
    silence: float

    @property
    def silent(self) -> bool:
        return self.silence > SILENCE

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def waits(self) -> bool:
        return self.call_state in ("queued", "started")


class _TrackedRank:
    """What is known of a rank that runs. at: when it started"""

    def __init__(self, hello: Message, at: float) -> None:
        self.pid = int(hello["pid"])
        self.agent = int(hello["agent"])
        self.host = str(hello.get("host", ""))
        self.beat: Message = {}
        self.beat_at = at
        self.heard_at = at  # a beat or anything else
        self.cpu: float | None = None
        self.mark = 0.0, at  # CPU seconds and time of the last sign of activity
        self.joining: float | None = None  # since when it waits in `collectives.init`
        self.beats = self.running = 0  # since its last progress, and those of them that found it running

    @property
    def in_call(self) -> bool:
        return self.beat.get("call_state") in ("queued", "started")

    @property
    def waits(self) -> bool:
        return self.in_call or self.joining is not None

    def snapshot(self, rank: int, at: float) -> RankSnapshot:
        beat, since = self.beat, at - self.beat_at
        call, state, age = beat.get("call"), beat.get("call_state"), float(beat.get("call_age") or 0.0) + since
        if self.joining is not None:
            call, state, age = INIT, "started", at - self.joining
        return RankSnapshot(
            rank=rank,
            pid=self.pid,
            agent=self.agent,
            host=self.host,
            state=str(beat.get("state") or "?"),
            calls=int(beat.get("calls") or 0),
            call=call,
            on=beat.get("call_on"),
            call_state=state,
            call_age=age,
            where=beat.get("where"),
            where_age=float(beat.get("where_age") or 0.0) + since,
            cpu=self.cpu,
            ran=self.running / self.beats if self.beats else 0.0,
            silence=at - self.heard_at,
        )


class Liveness:
    """Follows a job of `n` ranks. All times are in s, on one clock that stands still whenever the job is made to."""

    def __init__(self, n: int, at: float = 0.0) -> None:
        self._missing = n
        self._tracked: dict[int, _TrackedRank] = {}
        self._progress_at = at  # the last of each
        self._active_at = at

    def rank_started(self, rank: int, hello: Message, at: float) -> None:
        """A rank has started."""
        self._missing -= 1
        self._tracked[rank] = _TrackedRank(hello, at)
        self._progress_at = at

    def rank_ended(self, rank: int, at: float) -> None:
        """A rank has ended."""
        if self._tracked.pop(rank, None) is not None:
            self._progress_at = at

    def joining(self, rank: int, waits: bool, at: float) -> None:
        """A rank waits in `collectives.init` from now on, or no longer."""
        tracked = self._tracked.get(rank)
        if tracked is not None:
            tracked.joining = at if waits else None
            self._progress_at = at

    def output(self, rank: int, at: float) -> None:
        """A rank has written something."""
        tracked = self._tracked.get(rank)
        if tracked is not None:
            tracked.heard_at = at
            if not tracked.waits:
                self._progress_at = at

    def heartbeat(self, rank: int, beat: Message, at: float) -> None:
        """An agent says how its rank does."""
        tracked = self._tracked.get(rank)
        if tracked is None:
            return
        before, tracked.beat = tracked.beat, beat
        own, passed = float(beat.get("cpu") or 0.0), at - tracked.beat_at
        # Beats that come at once, after the launcher was held up, say nothing about a rate.
        if "cpu" in before and passed >= 0.2:
            tracked.cpu = max(0.0, own - float(before["cpu"] or 0.0)) / passed
        used = own + float(beat.get("below") or 0.0)
        tracked.heard_at = tracked.beat_at = at
        changed = any(before.get(name) != beat.get(name) for name in ("calls", "call", "call_state", "step"))
        cpu, since = tracked.mark
        if changed:
            tracked.beats = tracked.running = 0
        tracked.beats += 1
        tracked.running += beat.get("state") == "R"
        if changed:
            self._progress_at = at
        elif not tracked.waits and used - cpu > _IDLE_BURST + _IDLE_SHARE * (at - since):
            self._active_at = at
        elif used >= cpu:
            return
        # Else what a child had used has gone with it, since no process waited for its end.
        tracked.mark = used, at

    def quiet(self, at: float) -> float:
        """For how many seconds nothing has moved, 0.0 where there is nothing to judge."""
        all_tracked = self._tracked.values()
        if self._missing > 0 or not all_tracked:
            return 0.0
        if any(tracked.in_call for tracked in all_tracked):
            return at - self._progress_at
        if any(tracked.beat.get("calls") or tracked.waits for tracked in all_tracked):
            return at - max(self._progress_at, self._active_at)
        latest = max(tracked.heard_at for tracked in all_tracked)
        return at - latest if at - latest > SILENCE else 0.0

    def snapshots(self, at: float) -> list[RankSnapshot]:
        """The ranks that run, in order."""
        return [tracked.snapshot(rank, at) for rank, tracked in sorted(self._tracked.items())]
