"""The ranks of a running job as their agents describe them, and which of them wait in `collectives.init`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collectives.world import STOPPED
from launcher.diagnosis.failures import Stop, name_ranks, stop_of
from launcher.protocol import Channel, Message


class RankProcess:
    """What is known of one rank."""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.channel = channel
        self.pid = int(hello["pid"])
        self.agent = int(hello["agent"])
        self.started = int(hello["started"])  # by the engine: the agent, or a reaper above it
        self.engine = int(hello["engine"])
        self.engine_name = str(hello["name"])
        self.host = str(hello.get("host", ""))
        self.leaving = False  # it has said why it ends
        self.saved = False  # it stops as it was asked to, whatever becomes of its exit handlers
        self.step: int | None = None  # after which it stops as it was asked to
        self.status: int | None = None  # exit code, or minus the signal that killed it
        self.asked = False  # its agent got a signal to end that is not the launcher's
        self.debugging = False
        self.lost = False
        self.closed = False  # the connection

    @property
    def over(self) -> bool:
        """The rank runs no more."""
        return self.lost or self.status is not None


class RankTable:
    """All ranks of one start of a job, of which there are to be `n`."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._processes: dict[int, RankProcess] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._processes

    def __getitem__(self, rank: int) -> RankProcess:
        return self._processes[rank]

    def __iter__(self) -> Iterator[tuple[int, RankProcess]]:
        return iter(self._processes.items())

    def add(self, rank: int, process: RankProcess) -> None:
        """Adds a rank whose agent has connected."""
        self._processes[rank] = process

    @property
    def complete(self) -> bool:
        """The agents of all ranks have connected."""
        return len(self._processes) == self.n

    @property
    def over(self) -> bool:
        """All connected ranks have ended."""
        return all(process.over for process in self._processes.values())

    @property
    def saved(self) -> bool:
        """All have stopped as they were asked to: nothing that happens from now on costs the job anything."""
        return self.complete and all(process.saved for process in self._processes.values())

    def missing(self) -> tuple[int, ...]:
        """The ranks whose agents have not connected."""
        return tuple(rank for rank in range(self.n) if rank not in self._processes)

    def debugging(self) -> frozenset[int]:
        """Those in a debugger."""
        return frozenset(rank for rank, process in self if process.debugging and not process.over)

    def stop(self) -> Stop | None:
        """How they stopped, if they did so as they were asked to."""
        steps = [process.step for _, process in self if process.step is not None]
        return stop_of({rank: STOPPED if process.saved else process.status for rank, process in self}, steps)

    def several_hosts(self) -> bool:
        """They are not all on one host."""
        return len({process.host for _, process in self}) > 1

    def tell(self, message: Message, who: Callable[[RankProcess], bool] = lambda process: True) -> None:
        """Sends a message to the agents of those for whom `who` is true."""
        for _, process in self:
            if not process.closed and who(process):
                process.channel.send(message)

    def close(self) -> None:
        """Closes all connections; agents that still run end with their ranks."""
        for _, process in self:
            process.channel.close()


class JoiningRanks:
    """The ranks of one job on their way into its world."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._waiting: dict[int, float] = {}  # for how long at most (s)
        self._joined: set[int] = set()

    def waits(self, rank: int, limit: float | None) -> None:
        """A rank waits for the others, `limit` seconds at most; None: no longer, since all have come."""
        if limit is not None:
            self._waiting[rank] = limit
        else:
            self._waiting.pop(rank, None)
            self._joined.add(rank)

    def rank_ended(self, rank: int) -> None:
        """A rank has ended, and waits no more."""
        self._waiting.pop(rank, None)

    def missed(self, rank: int) -> tuple[int, ...]:
        """The ranks that wait for one which has ended and so will never come: none if it has been there."""
        return () if rank in self._joined else tuple(sorted(self._waiting))

    @property
    def limit(self) -> float | None:
        """The shortest time limit of the ranks that wait (s); None if no rank waits."""
        return min(self._waiting.values(), default=None)

    def sentence(self) -> str:
        """What to say when that time is over."""
        missed = [rank for rank in range(self._n) if rank not in self._waiting and rank not in self._joined]
        waiting, limit = name_ranks(sorted(self._waiting)), self.limit or 0.0
        if not missed:
            return f"the world of all ranks was not there within {limit:g} s, for which {waiting} waited"
        return f"{name_ranks(missed)} did not come to collectives.init() within {limit:g} s, where {waiting} waited"
