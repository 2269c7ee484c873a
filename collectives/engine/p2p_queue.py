"""Matching: which eager message belongs to which receive, as in MPI (4.1, §3.5).

Eager messages of all ranks and tags arrive in one stream, and are matched with receives in the order in which they were
sent and posted. So a receive may name any source, and a tag any number. Only steps of calls use this, which one thread
at a time takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectives.engine.array_header import EagerMessage, decode_eager
from collectives.exit_notice import ExitNotice, left_before
from collectives.transport import Transport


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive. src: a rank, None: any; message: once it is matched"""

    src: int | None
    tag: int
    message: EagerMessage | None = None


class P2PQueue:
    """The messages of one communicator on one rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._posted: list[Receive] = []
        self._unexpected: list[EagerMessage] = []
        # By rank: eager messages sent to it and arrived from it; large arrays received from it and received by it.
        self.sent, self._arrived, self._received, self.fetched = ([0] * transport.size for _ in range(4))

    def post(self, src: int | None, tag: int) -> Receive:
        """Posts a receive; `matched` is its test."""
        receive = Receive(src, tag)
        for index, message in enumerate(self._unexpected):
            if self._match(receive, message):
                del self._unexpected[index]
                return receive
        self._posted.append(receive)
        return receive

    def matched(self, receive: Receive) -> bool:
        """Looks for eager messages that have arrived, for all receives; True if this one has got its own."""
        while receive.message is None and (arrived := self._transport.arrived()) is not None:
            self.deliver(decode_eager(*arrived))
        return receive.message is not None

    def deliver(self, message: EagerMessage) -> None:
        """Takes in an eager message that has arrived."""
        self._arrived[message.src] += 1
        for index, receive in enumerate(self._posted):
            if self._match(receive, message):
                del self._posted[index]
                return
        self._unexpected.append(message)

    def _match(self, receive: Receive, message: EagerMessage) -> bool:
        """Gives the message to that receive if it fits."""
        if receive.tag != message.tag or receive.src not in (None, message.src):
            return False
        receive.message = message
        self._received[message.src] += bool(message.rendezvous_tag)
        return True

    def never_sent(self, src: int | None, exit_notices: Mapping[int, ExitNotice]) -> list[int]:
        """The ranks whose leaving ends an unmatched receive: all that they sent has arrived, and no other can send."""
        me = self._transport.rank
        gone = [
            rank
            for rank, left in exit_notices.items()
            if src in (None, rank) and left_before({rank: left}, self._line(rank, me, "sent"), self._arrived[rank])
        ]
        others_left = len(gone) == self._transport.size - 1
        return gone if src is not None or others_left else [rank for rank in gone if exit_notices[rank].failed]

    def never_received(self, dst: int, exit_notices: Mapping[int, ExitNotice]) -> list[int]:
        """That rank, if it has left without receiving the large array that a send offers."""
        left = {dst: exit_notices[dst]} if dst in exit_notices else {}
        return left_before(left, self._line(self._transport.rank, dst, "received"), self.fetched[dst])

    def counts(self) -> dict[str, int]:
        """How many eager messages this rank sent and large arrays it received, for the others when it leaves."""
        me = self._transport.rank
        sent = {self._line(me, dst, "sent"): n for dst, n in enumerate(self.sent) if n}
        return sent | {self._line(src, me, "received"): n for src, n in enumerate(self._received) if n}

    def _line(self, src: int, dst: int, what: str) -> str:
        return f"{self._transport.key} {src}>{dst} {what}"
