"""Sends and receives under way: outside the queue of collectives, each on its own.

In one queue, two ranks that both send first would wait for each other for ever. So a send or receive is posted at once,
in the caller, which keeps those of one rank in their order of calls. What is left to do is driven by a thread that
waits for it, first by repeated tests without a pause and then with pauses; what no thread waits for, by one helper
thread for all of a communicator's asynchronous sends and receives.

Eager messages of all ranks and tags arrive in one stream, and are matched with receives here as in MPI (4.1, §3.5):
in the order in which they were sent and posted. So a receive may name any source, and a tag any number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from collectives.engine.array_header import EagerMessage, decode_eager
from collectives.engine.call import CollectiveOp
from collectives.engine.progress import PAUSE, WaitMonitor, spin
from collectives.engine.queue import CallQueue
from collectives.errors import CollectivesError
from collectives.exit_notice import ExitNotice, left_before
from collectives.time_limit import TimeLimit
from collectives.transport import Transport

T = TypeVar("T")

# s; between two looks of the helper thread while it finds only calls that were not there at the look before, or that a
# thread waits for. Each look may take the GIL from a thread that exchanges short messages, for longer than one takes.
_LONG_PAUSE = 1e-3
# Looks without any call after which it sleeps until it is woken, which costs as much as a short message.
_IDLE_LOOKS = 10


class Receive:
    """A posted receive. src: a rank, None: any; message: once it is matched"""

    __slots__ = ("message", "src", "tag")

    def __init__(self, src: int | None, tag: int) -> None:
        self.src = src
        self.tag = tag
        self.message: EagerMessage | None = None

    def matches(self, message: EagerMessage) -> bool:
        """True if it may be matched with that message."""
        return self.tag == message.tag and (self.src is None or self.src == message.src)


class P2PQueue:
    """The point-to-point calls of one communicator on one rank."""

    def __init__(self, queue: CallQueue, transport: Transport) -> None:
        self._queue = queue
        self._transport = transport
        self._unexpected: list[EagerMessage] = []
        # By rank: eager messages sent to it and arrived from it; large arrays received from it and received by it.
        self._sent, self._arrived, self._received, self._fetched = ([0] * transport.size for _ in range(4))
        queue.p2p_counts, queue.forked = self.counts, self._begin
        self._begin()

    def _begin(self) -> None:
        """Nothing is posted or under way. In a forked child, all that and the helper thread are the parent's."""
        self._matching = threading.Lock()
        self._posted: list[Receive] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way: list[_Posted] = []
        self._helper: threading.Thread | None = None
        self._helper_waits = False
        self._ended = False

    # Matching --------------------------------------------------------------------------------------------------------

    def post(self, src: int | None, tag: int) -> Receive:
        """Posts a receive; `matched` is its test."""
        receive = Receive(src, tag)
        with self._matching:
            for index, message in enumerate(self._unexpected):
                if receive.matches(message):
                    del self._unexpected[index]
                    self._match(receive, message)
                    return receive
            self._posted.append(receive)
        return receive

    def matched(self, receive: Receive) -> bool:
        """Looks for eager messages that have arrived, for all receives; True if this one has got its own."""
        if receive.message is None:
            with self._matching:
                while (arrived := self._transport.arrived()) is not None:
                    self._deliver(decode_eager(*arrived))
                    if receive.message is not None:
                        break
        return receive.message is not None

    def deliver(self, message: EagerMessage) -> None:
        """Takes in an eager message that this rank sends to itself."""
        with self._matching:
            self._deliver(message)

    def _deliver(self, message: EagerMessage) -> None:
        self._arrived[message.src] += 1
        for index, receive in enumerate(self._posted):
            if receive.matches(message):
                del self._posted[index]
                self._match(receive, message)
                return
        self._unexpected.append(message)

    def _match(self, receive: Receive, message: EagerMessage) -> None:
        receive.message = message
        if message.rendezvous_tag:
            self._received[message.src] += 1

    # Ranks that have left --------------------------------------------------------------------------------------------

    def sent(self, dst: int) -> None:
        """An eager message to that rank has been posted."""
        with self._matching:
            self._sent[dst] += 1

    def fetched(self, dst: int) -> None:
        """A large array has been received by that rank."""
        with self._matching:
            self._fetched[dst] += 1

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
        return left_before(left, self._line(self._transport.rank, dst, "received"), self._fetched[dst])

    def counts(self) -> dict[str, int]:
        """How many eager messages this rank sent and large arrays it received, for the others when it leaves."""
        me = self._transport.rank
        sent = {self._line(me, dst, "sent"): n for dst, n in enumerate(self._sent) if n}
        return sent | {self._line(src, me, "received"): n for src, n in enumerate(self._received) if n}

    def _line(self, src: int, dst: int, what: str) -> str:
        return f"{self._transport.key} {src}>{dst} {what}"

    # Driving ---------------------------------------------------------------------------------------------------------

    def run(self, call: CollectiveOp[T]) -> T:
        """Runs `call` now, and returns its result."""
        self._not_in_helper(call)
        self._queue.enter_unordered(call)
        try:
            return self._queue.drive(call)
        finally:
            self._queue.leave_unordered()

    def submit(self, call: CollectiveOp[Any]) -> None:
        """Posts `call` now, and has the threads that wait for it and the helper thread see it through."""
        self._queue.enter_unordered(call)
        posted = _Posted(call, self._queue, self._transport)
        if posted.advance():
            return

        def drive(timeout: float | None) -> bool:
            self._not_in_helper(call)
            return posted.drive(timeout)

        call.drive = drive
        with self._lock:
            self._under_way.append(posted)
            if self._helper is None:
                name = f"collectives-{self._transport.key}-p2p"
                self._helper = threading.Thread(target=self._help, name=name, daemon=True)
                self._helper.start()
            elif self._helper_waits:
                self._changed.notify()

    def end(self) -> None:
        """Lets the helper thread end; nothing is under way."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _not_in_helper(self, call: CollectiveOp[Any]) -> None:
        if self._helper is not None and threading.current_thread() is self._helper:
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) is waited for in a done callback, which runs "
                "in the thread that drives it: give it async_op=True, and wait for it elsewhere"
            )

    def _help(self) -> None:
        before: list[_Posted] = []
        idle = 0
        while True:
            time.sleep(PAUSE if before else _LONG_PAUSE)
            with self._changed:
                if not self._under_way:
                    idle += 1
                    if idle > _IDLE_LOOKS and not self._ended:
                        self._helper_waits = True
                        self._changed.wait_for(lambda: self._under_way or self._ended)
                        self._helper_waits = False
                        idle = 0
                        continue
                    if self._ended:
                        return
                now = [posted for posted in self._under_way if not posted.waited_for]
            for posted in before:
                posted.advance(monitored=True)
            with self._changed:
                self._under_way = [posted for posted in self._under_way if not posted.call.finished()]
            # What is finished is let go of: its arrays belong to whoever waits, not to an idle thread.
            before = [posted for posted in now if not posted.call.finished()]
            del now


class _Posted:
    """A call whose steps are taken as they become possible, by one thread at a time, never waiting."""

    def __init__(self, call: CollectiveOp[Any], queue: CallQueue, transport: Transport) -> None:
        self.call = call
        self._queue = queue
        self._transport = transport
        self._lock = threading.Lock()
        self.waited_for = False  # by a thread, which drives it
        self._monitor: WaitMonitor | None = None  # of the test that the call waits for

    def drive(self, timeout: float | None) -> bool:
        """Advances the call until it is finished, in a thread that waits for it; False after `timeout` seconds."""
        limit = None if timeout is None else TimeLimit(timeout)
        self.waited_for = True
        try:
            if spin(self.advance):
                return True
            while not (limit is not None and limit.passed()):
                time.sleep(PAUSE)
                if self.advance(monitored=True):
                    return True
            return False
        finally:
            self.waited_for = False

    def advance(self, monitored: bool = False) -> bool:
        """Takes what steps can be taken; True once the call is finished, well or not.

        monitored: also ends the call when its time is over or the rank that it needs has left
        """
        call = self.call
        if not self._lock.acquire(blocking=False):
            return call.finished()
        try:
            if call.finished():
                return True
            while call.test is None or call.test():
                call.test, self._monitor = next(call.steps), None
            if monitored:
                self._monitor = self._monitor or WaitMonitor(call.test, call, self._transport)
                self._monitor.poll()
            return False
        except StopIteration as end:
            call.finish(end.value, None)
        except Exception as error:
            self._queue.fail(call, error)
        except BaseException:  # Ctrl-C: how far it came, nobody knows
            self._queue.fail(call, KeyboardInterrupt())
            self._queue.leave_unordered()
            raise
        finally:
            self._lock.release()
        self._queue.leave_unordered()
        return True
