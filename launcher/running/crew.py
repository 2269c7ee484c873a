"""The ranks of a running job as their keepers describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from launcher.wire import Channel, Message


class Member:
    """What is known of one rank."""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.channel = channel
        self.pid = int(hello["pid"])
        self.keeper = int(hello["keeper"])
        self.engine = int(hello["engine"])
        self.engine_name = str(hello["name"])
        self.host = str(hello.get("host", ""))
        self.leaving = False  # it has said why it ends
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

    def missing(self) -> tuple[int, ...]:
        """Those that have not come."""
        return tuple(rank for rank in range(self.n) if rank not in self._members)

    def debugging(self) -> frozenset[int]:
        """Those in a debugger."""
        return frozenset(rank for rank, member in self if member.debugging and not member.over)

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
