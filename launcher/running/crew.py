"""The ranks of a running job as their keepers describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collectives.world import STOPPED
from launcher.judging.stopping import Stop, stop_of
from launcher.wire import Channel, Message


class Member:
    """What is known of one rank."""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.channel = channel
        self.pid = int(hello["pid"])
        self.keeper = int(hello["keeper"])
        self.started = int(hello["started"])  # by the engine: the keeper, or a guard above it
        self.engine = int(hello["engine"])
        self.engine_name = str(hello["name"])
        self.host = str(hello.get("host", ""))
        self.leaving = False  # it has said why it ends
        self.saved = False  # it stops as it was asked to, whatever becomes of its exit handlers
        self.step: int | None = None  # after which it stops as it was asked to
        self.status: int | None = None  # exit code, or minus the signal that killed it
        self.asked = False  # by somebody but the launcher to end
        self.debugging = False
        self.lost = False
        self.closed = False  # the connection

    @property
    def over(self) -> bool:
        """The rank runs no more."""
        return self.lost or self.status is not None


class Crew:
    """All ranks of one start of a job, of which there are to be `n`."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._members: dict[int, Member] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._members

    def __getitem__(self, rank: int) -> Member:
        return self._members[rank]

    def __iter__(self) -> Iterator[tuple[int, Member]]:
        return iter(self._members.items())

    def add(self, rank: int, member: Member) -> None:
        """A rank has come."""
        self._members[rank] = member

    @property
    def complete(self) -> bool:
        """All have come."""
        return len(self._members) == self.n

    @property
    def over(self) -> bool:
        """None of those that have come runs any more."""
        return all(member.over for member in self._members.values())

    @property
    def saved(self) -> bool:
        """All have stopped as they were asked to: nothing that happens from now on costs the job anything."""
        return self.complete and all(member.saved for member in self._members.values())

    def missing(self) -> tuple[int, ...]:
        """Those that have not come."""
        return tuple(rank for rank in range(self.n) if rank not in self._members)

    def debugging(self) -> frozenset[int]:
        """Those in a debugger."""
        return frozenset(rank for rank, member in self if member.debugging and not member.over)

    def stop(self) -> Stop | None:
        """How they stopped, if they did so as they were asked to."""
        steps = [member.step for _, member in self if member.step is not None]
        return stop_of({rank: STOPPED if member.saved else member.status for rank, member in self}, steps)

    def several_hosts(self) -> bool:
        """They are not all on one host."""
        return len({member.host for _, member in self}) > 1

    def tell(self, message: Message, who: Callable[[Member], bool] = lambda member: True) -> None:
        """Sends a message to the keepers of those for whom `who` is true."""
        for _, member in self:
            if not member.closed and who(member):
                member.channel.send(message)

    def close(self) -> None:
        """Closes all connections; keepers that still run end with their ranks."""
        for _, member in self:
            member.channel.close()
