"""Point to point: send and recv, for what only two ranks have to do with.

An eager message goes first: dtype and shape, and the array itself if it is small. A large array follows under a tag
that the message names, so that it can be received in place whatever else is under way between the two ranks.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, TypeVar

from collectives.arrays import as_array, as_bytes, contiguous, is_device_array
from collectives.engine import array_header as header
from collectives.engine.call import CollectiveOp, Work
from collectives.engine.communicator_base import CommunicatorBase, whole
from collectives.engine.p2p_queue import P2PQueue
from collectives.engine.queue import CommunicatorRegistry
from collectives.ops.data_movement import hand_out, result_array
from collectives.transport import EAGER_TAG, RENDEZVOUS_TAG, Steps, Transport

T = TypeVar("T")

_LARGEST_TAG = 2**31 - 1  # as in mpi4py and torch.distributed


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

        x: (...), of any dtype; dst: a rank; tag: 0 to 2,147,483,647, messages of different tags do not mix
        What is sent to one rank under one tag arrives in order. An array of up to about 4,000 bytes is on its way when
        this returns; a larger one is complete only when dst receives it, so two ranks that exchange large arrays must
        send with `async_op=True`, or one of them receive first. What a rank sends to itself is copied.

        Returns: None
        Raises: ArgumentError if there is no such rank or tag; PeerLeft if dst leaves without receiving it.
        """
        dst, tag = whole(dst, 0, self.size - 1, "dst should be a rank"), _check_tag(tag)
        source = self._device(x).to_host(x) if is_device_array(x) else as_array(x)
        moved = contiguous(source)

        def steps(call: CollectiveOp[None]) -> Steps[None]:
            if dst == self.rank:
                copy = moved.copy()
                self._p2p.deliver(header.EagerMessage(dst, tag, 0, copy.dtype, copy.shape, as_bytes(copy)))
                return
            message, rendezvous_tag = header.encode_eager(
                moved, tag, RENDEZVOUS_TAG + next(self._rendezvous_tags) % RENDEZVOUS_TAG
            )
            first = self.transport.send(message, dst, EAGER_TAG)
            second = self.transport.send(as_bytes(moved), dst, rendezvous_tag) if rendezvous_tag else None
            self._p2p.sent[dst] += 1
            yield first
            if second is not None:
                yield second
                self._p2p.fetched[dst] += 1

        call: CollectiveOp[None] = CollectiveOp("send", source, f"to {dst} tag {tag}", self.timeout)
        call.steps = steps(call)
        call.peers, call.gone = (dst,), partial(self._p2p.never_received, dst)
        return self._post(call, async_op)

    def recv(self, src: int | None, *, tag: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """What rank src sends to this one; None: what any rank sends, together with that rank's number.

        src, tag: as in `send`; out: (...) of the sender's shape and dtype
        Returns: a new array of the sender's shape and dtype, or out; for src None a pair of that and the sender's rank
        Raises: ArgumentError if there is no such rank or tag, or out does not fit, in which case the message is lost;
        PeerLeft if src leaves without sending it, and for src None if every other rank does, or one has failed.
        """
        if src is not None:
            src = whole(src, 0, self.size - 1, "src should be None, for any, or a rank")
        tag = _check_tag(tag)
        if is_device_array(out):
            device = self._device(out)
            if async_op:
                return device.receive_work(self.recv(src, tag=tag, async_op=True), out)
            return device.to_device(self.recv(src, tag=tag), out)
        target = None if out is None else as_array(out, "out")

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            receive = self._p2p.post(src, tag)
            yield lambda: self._p2p.matched(receive)
            message = receive.message
            assert message is not None
            received = result_array(message.shape, message.dtype, None, target)
            if message.rendezvous_tag:
                yield self.transport.recv(as_bytes(received), message.src, message.rendezvous_tag)
            else:
                as_bytes(received)[:] = message.body
            result = hand_out(received, target, out)
            return result if src is not None else (result, message.src)

        what = f"from {'any rank' if src is None else src} tag {tag}"
        call: CollectiveOp[Any] = CollectiveOp("recv", target, what, self.timeout)
        call.steps = steps(call)
        call.peers, call.gone = self._others if src is None else (src,), partial(self._p2p.never_sent, src)
        return self._post(call, async_op)

    def _post(self, call: CollectiveOp[T], async_op: bool) -> T | Work[T]:
        if not async_op:
            return self.queue.run(call, ordered=False)
        self.queue.submit(call, ordered=False)
        return Work(call)


def _check_tag(tag: Any) -> int:
    return whole(tag, 0, _LARGEST_TAG, "tag should be a number")
