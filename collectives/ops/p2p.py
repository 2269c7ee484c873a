"""Point to point: send and recv, between two ranks.

An eager message goes first: dtype and shape, and the array itself if it is small. A large array follows with a tag that
the message names, so that it can be received in place whatever else is in flight between the two ranks.

`Transport.arrived` returns the eager messages of all ranks and tags. `P2PQueue` matches them with receives: messages in
the order of sending, receives in the order of posting, as in MPI (4.1, §3.5). So a receive may accept any source, and
tags are not limited to those that MPI supports. `P2PQueue` has no lock: only the steps of calls change it, and only one
thread at a time runs steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from collectives.arrays import as_array, as_bytes, contiguous, is_device_array
from collectives.engine.array_header import EagerMessage, decode_eager, encode_eager
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.communicator_base import CommunicatorBase, check_int
from collectives.engine.registry import CommunicatorRegistry
from collectives.reduction import Array
from collectives.transport import (
    EAGER_LIMIT,
    EAGER_TAG,
    RENDEZVOUS_TAG,
    ExitNotice,
    Steps,
    Test,
    Transport,
    left_before,
)


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive. src: a rank; None: any rank. message: set once the receive is matched"""

    src: int | None
    tag: int
    message: EagerMessage | None = None


class P2PQueue:
    """The messages of one communicator on one rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._posted: list[Receive] = []
        self._unexpected: list[EagerMessage] = []
        # For each other rank: how many eager messages were sent to it, and how many have arrived from it.
        self.sent = [0] * transport.size
        self._arrived = [0] * transport.size
        # For each other rank: how many of its large arrays were matched with a receive here, and how many large arrays
        # it has received from this rank.
        self._received = [0] * transport.size
        self.fetched = [0] * transport.size

    def post(self, src: int | None, tag: int) -> Receive:
        """Posts a receive. `matched` returns True once the receive has its message."""
        receive = Receive(src, tag)
        for index, message in enumerate(self._unexpected):
            if self._match(receive, message):
                del self._unexpected[index]
                return receive
        self._posted.append(receive)
        return receive

    def matched(self, receive: Receive) -> bool:
        """Distributes eager messages that have arrived, until `receive` has its message. Returns: whether it has"""
        while receive.message is None and (arrived := self._transport.arrived()) is not None:
            self.deliver(decode_eager(*arrived))
        return receive.message is not None

    def all_matched(self, receives: Mapping[int, Receive], missing: list[int]) -> bool:
        """True if all receives have got their messages.

        receives: by rank; missing: set to the ranks whose messages have not arrived
        """
        missing[:] = [rank for rank, receive in receives.items() if not self.matched(receive)]
        return not missing

    def deliver(self, message: EagerMessage) -> None:
        """Gives an eager message that has arrived to a receive, or keeps it until there is one."""
        self._arrived[message.src] += 1
        for index, receive in enumerate(self._posted):
            if self._match(receive, message):
                del self._posted[index]
                return
        self._unexpected.append(message)

    def _match(self, receive: Receive, message: EagerMessage) -> bool:
        """Gives the message to the receive if source and tag match. Returns: whether they do"""
        if receive.tag != message.tag or receive.src not in (None, message.src):
            return False
        receive.message = message
        self._received[message.src] += bool(message.rendezvous_tag)
        return True

    def never_sent(self, src: int | None, exit_notices: Mapping[int, ExitNotice]) -> list[int]:
        """The ranks whose exit ends an unmatched receive from `src`; none while a message may still come.

        No message can come from a rank that has failed, or that has left and whose messages have all arrived. A receive
        from any source ends when this holds for all other ranks, or one of them has failed.
        """
        me = self._transport.rank
        exited = [
            rank
            for rank, notice in exit_notices.items()
            if src in (None, rank) and left_before({rank: notice}, self._key(rank, me, "sent"), self._arrived[rank])
        ]
        if src is not None or len(exited) == self._transport.size - 1:
            return exited
        return [rank for rank in exited if exit_notices[rank].failed]

    def never_received(self, dst: int, exit_notices: Mapping[int, ExitNotice]) -> list[int]:
        """[dst] if rank dst has failed, or has left without receiving the large array of a send to it; else []."""
        notices = {dst: exit_notices[dst]} if dst in exit_notices else {}
        return left_before(notices, self._key(self._transport.rank, dst, "received"), self.fetched[dst])

    def counts(self) -> dict[str, int]:
        """The counts for the exit notice, by key: eager messages sent, and large arrays matched with a receive here."""
        me = self._transport.rank
        sent = {self._key(me, dst, "sent"): n for dst, n in enumerate(self.sent) if n}
        return sent | {self._key(src, me, "received"): n for src, n in enumerate(self._received) if n}

    def _key(self, src: int, dst: int, counted: str) -> str:
        return f"{self._transport.key} {src}>{dst} {counted}"


T = TypeVar("T")

#: The largest int of C, the type of tags in MPI and torch.distributed.
LARGEST_TAG = 2**31 - 1


class PointToPoint(CommunicatorBase):
    """The point-to-point calls of a communicator."""

    def __init__(self, transport: Transport, timeout: float, registry: CommunicatorRegistry | None = None) -> None:
        super().__init__(transport, timeout, registry)
        self._p2p = P2PQueue(transport)
        self.queue.p2p_counts = self._p2p.counts
        self._rendezvous_tags = itertools.count()
        self._others = [rank for rank in range(self.size) if rank != self.rank]

    def send(self, x: Any, dst: int, *, tag: int = 0, async_op: bool = False) -> Any:
        """Sends x to rank dst, which receives it by `recv`.

        x: (...); dst: a rank; tag: 0 to 2,147,483,647, messages with different tags do not mix
        Arrays that are sent to one rank with one tag arrive in order. An array of up to about 4,000 bytes is in transit
        when this returns. The send of a larger array may be complete only when dst receives it. So if two ranks
        exchange large arrays, at least one of them must send with `async_op=True`, or receive first. An array for this
        rank itself is copied. An array on a GPU is first copied to host memory. The call waits for this copy, also with
        `async_op=True`.

        Returns: None
        Raises: ArgumentError if there is no such rank or tag, or x requires grad; DtypeError if x is not an array of
        numbers; PeerLeft if dst leaves without receiving a larger array; CollectiveTimeout if dst does not receive a
        larger array in time, or the copy from a GPU takes too long.
        """
        dst = check_int(dst, 0, self.size - 1, "dst should be a rank")
        tag = _check_tag(tag)
        source = self._device(x).to_host(x) if is_device_array(x) else as_array(x)
        dense = contiguous(source)

        def steps(call: CollectiveOp[None]) -> Steps[None]:
            if dst == self.rank:
                copy = dense.copy()
                self._p2p.deliver(EagerMessage(dst, tag, 0, copy.dtype, copy.shape, as_bytes(copy)))
                return
            rendezvous_tag = RENDEZVOUS_TAG + next(self._rendezvous_tags) % RENDEZVOUS_TAG
            message, rendezvous_tag = encode_eager(dense, tag, rendezvous_tag)
            eager = self._send_message(message, dst)
            large = self.transport.send(as_bytes(dense), dst, rendezvous_tag) if rendezvous_tag else None
            yield eager
            if large is not None:
                yield large
                self._p2p.fetched[dst] += 1

        plan = self._plan(_plan_message, ("", "send", dst, tag, source.dtype, source.shape))
        call = self._new_call(plan, steps)
        call.peers = (dst,)
        call.ended_by = partial(self._p2p.never_received, dst)
        return self._run(call, async_op, ordered=False)

    def recv(self, src: int | None, *, tag: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """Receives an array that rank src sends to this rank.

        src: a rank; None: any rank; tag: as in `send`; out: (...) of the sender's shape and dtype
        Returns: a new array of the sender's shape and dtype, or out; if src is None: this array, and the sender's rank
        Raises: ArgumentError if there is no such rank or tag, or if out does not fit (then the message is lost);
        PeerLeft if src leaves without sending. If src is None, PeerLeft if every other rank leaves, or one fails.
        """
        if src is not None:
            src = check_int(src, 0, self.size - 1, "src should be None, for any, or a rank")
        tag = _check_tag(tag)
        device = self._device(out) if is_device_array(out) else None
        arrays = self._host
        host_out = None if device else out
        target = None if host_out is None else arrays.read(host_out, "out")

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            receive = self._p2p.post(src, tag)
            yield lambda: self._p2p.matched(receive)
            message = receive.message
            assert message is not None
            received = arrays.result(message.shape, message.dtype, None, target)
            if message.rendezvous_tag:
                yield self.transport.recv(as_bytes(received), message.src, message.rendezvous_tag)
            else:
                as_bytes(received)[:] = message.body
            result = arrays.deliver(received, target, host_out)
            return result if src is not None else (result, message.src)

        dtype = None if target is None else target.dtype
        shape = None if target is None else target.shape
        call = self._new_call(self._plan(_plan_message, ("", "recv", src, tag, dtype, shape)), steps)
        call.peers = self._others if src is None else (src,)
        call.ended_by = partial(self._p2p.never_sent, src)
        # If the array fits into an eager message, its sender does not wait for this receive.
        awaited = target is None or target.nbytes > EAGER_LIMIT // 2
        result = self._run(call, async_op, ordered=False, awaited=awaited)
        if device is None:
            return result
        return device.receive_work(call, out) if async_op else device.to_device(result, out)

    def _send_eager(self, array: Array, dst: int, tag: int) -> Test:
        """Sends a small array that the communicator itself needs."""
        return self._send_message(encode_eager(array, tag, 0)[0], dst)

    def _send_message(self, message: Array, dst: int) -> Test:
        self._p2p.sent[dst] += 1
        return self.transport.send(message, dst, EAGER_TAG)


def _plan_message(device_text: str, name: str, peer: int | None, tag: int, dtype: Any, shape: Any) -> Plan:
    direction = "to" if name == "send" else "from"
    return Plan(name, f"{direction} {'any rank' if peer is None else peer} tag {tag}", dtype, shape)


def _check_tag(tag: Any) -> int:
    return check_int(tag, 0, LARGEST_TAG, "tag should be a number")
