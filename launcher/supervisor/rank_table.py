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
    """One rank, as its agent and its reports describe it. hello: the agent's first message"""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.channel = channel
        self.rank = int(hello["rank"])
        self.pid = int(hello["pid"])
        self.agent = int(hello["agent"])
        self.started = int(hello["started"])  # Pid of the process that the engine started: agent or agent supervisor.
        # Whether the agent is a descendant of the launcher's reaper. If not, the engine started an agent supervisor.
        self.below_reaper = self.started == self.agent
        self.engine = int(hello["engine"])
        self.engine_name = str(hello["name"])
        self.host = str(hello.get("host", ""))
        self.threads = str(hello.get("threads", ""))  # Its OMP_NUM_THREADS.
        # The agent's memory for the rank's state, as in `collectives.world.STATE_MEMORY`. [] if the agent holds none:
        # the rank uses the launcher's memory, or the job keeps no state in memory.
        self.slots: list[str] = hello.get("slots", [])
        self.held = False  # It has reported that the state of all ranks is in memory.
        # Time limit (s) of the rank's wait for the others in `collectives.init`; None while it does not wait.
        self.joining: float | None = None
        self.joined = False  # It has left `collectives.init`.
        self.leaving = False  # It has reported why it ends.
        self.saved = False  # It has ended with STOPPED, or reported that it will. Its later errors do not count.
        self.step: int | None = None  # The step after which it stops as it was asked to.
        # Maximum number of ranks to which its loop can be resized; 0: no limit; None: it has reported no such loop.
        self.resizable: int | None = None
        self.resizing = False  # It leaves that loop, and saves its state for the ranks of the next start.
        self.status: int | None = None  # Exit code, or minus the signal that killed it.
        self.asked = False  # Its agent got a signal to end that did not come from the launcher.
        self.debugging = False
        self.lost = False  # The connection to its agent ended before the agent had reported the rank's end.
        self.disconnected = False  # `lost`, although the launcher had not killed the ranks.
        self.closed = False  # The connection is closed.

    @property
    def over(self) -> bool:
        """Whether the rank has ended, or the connection to its agent is lost."""
        return self.lost or self.status is not None


class RankTable(dict[int, RankProcess]):
    """Those ranks of a job of `n` ranks whose agents have connected."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    @property
    def complete(self) -> bool:
        """Whether the agents of all ranks have connected."""
        return len(self) == self.n

    @property
    def over(self) -> bool:
        """Whether `RankProcess.over` is true of all connected ranks."""
        return all(process.over for process in self.values())

    @property
    def saved(self) -> bool:
        """Whether all ranks have saved their state and stop on request. A failure after that loses nothing."""
        return self.complete and all(process.saved for process in self.values())

    @property
    def max_ranks(self) -> float | None:
        """Maximum number of ranks to which the job can be resized; inf: no limit.

        None: some rank has not reported that it is in a loop that can be resized
        """
        limits = [process.resizable for process in self.values() if process.resizable is not None]
        return min(limit or math.inf for limit in limits) if len(limits) == self.n else None

    @property
    def held(self) -> bool:
        """Whether the state of all ranks has been copied to memory."""
        return self.complete and all(process.held for process in self.values())

    def slots(self) -> list[str]:
        """The slots of the state memory that agents hold. The next start can read them if these agents stay.

        [] if the state of some rank is not in memory, or while a rank below the reaper runs: to end that rank, the
        reaper must end everything.
        """
        if not self.held or any(not process.over and process.below_reaper for process in self.values()):
            return []
        return [slot for process in self.values() if process.over and not process.lost for slot in process.slots]

    def missing(self) -> tuple[int, ...]:
        """The ranks whose agents have not connected."""
        return tuple(rank for rank in range(self.n) if rank not in self)

    def debugging(self) -> frozenset[int]:
        """The ranks in a debugger."""
        return frozenset(rank for rank, process in self.items() if process.debugging and not process.over)

    def joining(self) -> dict[int, float]:
        """The ranks that wait in `collectives.init`, each with the time limit of its wait (s)."""
        return {
            rank: process.joining
            for rank, process in sorted(self.items())
            if process.joining is not None and not process.over
        }

    def joining_timeout(self) -> str:
        """The sentence for the user if ranks have waited in `collectives.init` for too long."""
        waiting = self.joining()
        names = name_ranks(list(waiting))
        limit = min(waiting.values(), default=0.0)
        late = [rank for rank in range(self.n) if rank not in waiting and not (rank in self and self[rank].joined)]
        if not late:
            large = f": {LARGE_PACKETS}" if self.several_hosts() else ""
            return f"the world of all ranks was not there within {limit:g} s, for which {names} waited{large}"
        return f"{name_ranks(late)} did not come to collectives.init() within {limit:g} s, where {names} waited"

    def stop(self) -> Stop | None:
        """How the ranks stopped; None if no rank has stopped as it was asked to."""
        steps = [process.step for process in self.values() if process.step is not None]
        ends = {rank: STOPPED if process.saved else process.status for rank, process in self.items()}
        return stop_of(ends, steps)

    def several_hosts(self) -> bool:
        """Whether the ranks are on more than one host."""
        return len({process.host for process in self.values()}) > 1

    def send(self, message: Message, to: Callable[[RankProcess], bool] = lambda process: not process.over) -> None:
        """Sends a message to the agents of those ranks for which `to` is true."""
        for process in self.values():
            if not process.closed and to(process):
                process.channel.send(message)

    def close(self) -> None:
        """Closes all connections. Agents that still run kill their ranks then, and end."""
        for process in self.values():
            process.channel.close()
        self.clear()
