"""The ranks of a running job, as their agents describe them."""

from __future__ import annotations

import math
from collections.abc import Callable

from collectives.errors import name_ranks
from collectives.world import STOPPED
from launcher.diagnosis.failures import Stop, stop_of
from launcher.errors import LARGE_PACKETS
from launcher.protocol import Channel, Message


class RankProcess:
    """The state of one rank. hello: the first message of its agent"""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.channel = channel
        self.pid = int(hello["pid"])
        self.agent = int(hello["agent"])
        self.started = int(hello["started"])  # by the engine: the agent, or an agent supervisor above it
        self.engine = int(hello["engine"])
        self.engine_name = str(hello["name"])
        self.host = str(hello.get("host", ""))
        self.joining: float | None = None  # time limit (s) of `collectives.init`, while it waits there for the others
        self.joined = False  # it has been there
        self.leaving = False  # it has reported why it ends
        self.saved = False  # it stops as it was asked to, whatever becomes of its exit handlers
        self.step: int | None = None  # after which it stops as it was asked to
        self.resizable: int | None = (
            None  # to how many ranks its loop can be resized at most; 0: to any number; None: it is in none
        )
        self.resizing = False  # it has left its loop, and its state to the ranks of the next start
        self.status: int | None = None  # exit code, or minus the signal that killed it
        self.asked = False  # its agent got a signal to end that is not the launcher's
        self.debugging = False
        self.lost = False  # its agent has closed the connection before the rank had ended
        self.silent = False  # it did so though nothing had asked it to
        self.closed = False  # the connection

    @property
    def over(self) -> bool:
        """The rank has ended, or cannot be reached any more."""
        return self.lost or self.status is not None


class RankTable(dict[int, RankProcess]):
    """The ranks whose agents have connected, of a job of `n`."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    @property
    def complete(self) -> bool:
        """The agents of all ranks have connected."""
        return len(self) == self.n

    @property
    def over(self) -> bool:
        """All connected ranks have ended."""
        return all(process.over for process in self.values())

    @property
    def saved(self) -> bool:
        """All have stopped as they were asked to: nothing that happens from now on costs the job anything."""
        return self.complete and all(process.saved for process in self.values())

    @property
    def max_ranks(self) -> float | None:
        """The largest number of ranks that the job can be resized to. None: not all ranks are in a loop for that"""
        limits = [process.resizable for process in self.values() if process.resizable is not None]
        return min(limit or math.inf for limit in limits) if len(limits) == self.n else None

    def missing(self) -> tuple[int, ...]:
        """The ranks whose agents have not connected."""
        return tuple(rank for rank in range(self.n) if rank not in self)

    def debugging(self) -> frozenset[int]:
        """The ranks in a debugger."""
        return frozenset(rank for rank, process in self.items() if process.debugging and not process.over)

    def joining(self) -> dict[int, float]:
        """The ranks that wait in `collectives.init`, and for how long they do at most (s)."""
        return {
            rank: process.joining
            for rank, process in sorted(self.items())
            if process.joining is not None and not process.over
        }

    def joining_timeout(self) -> str:
        """The sentence for a time limit of `collectives.init` that has passed."""
        waiting = self.joining()
        names, limit = name_ranks(list(waiting)), min(waiting.values(), default=0.0)
        late = [rank for rank in range(self.n) if rank not in waiting and not (rank in self and self[rank].joined)]
        if not late:
            large = f": {LARGE_PACKETS}" if self.several_hosts() else ""
            return f"the world of all ranks was not there within {limit:g} s, for which {names} waited{large}"
        return f"{name_ranks(late)} did not come to collectives.init() within {limit:g} s, where {names} waited"

    def stop(self) -> Stop | None:
        """How they stopped, if they did so as they were asked to."""
        steps = [process.step for process in self.values() if process.step is not None]
        return stop_of({rank: STOPPED if each.saved else each.status for rank, each in self.items()}, steps)

    def several_hosts(self) -> bool:
        """They are not all on one host."""
        return len({process.host for process in self.values()}) > 1

    def send(self, message: Message, to: Callable[[RankProcess], bool] = lambda process: not process.over) -> None:
        """Sends a message to the agents of those for whom `to` is true."""
        for process in self.values():
            if not process.closed and to(process):
                process.channel.send(message)

    def close(self) -> None:
        """Closes all connections; agents that still run end with their ranks."""
        for process in self.values():
            process.channel.close()
        self.clear()
