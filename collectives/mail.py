"""Sends and receives under way: beside the line of collectives, and each on its own.

In one line, two ranks that both send first would wait for each other for ever. So a send or receive is posted at once,
in the caller, which keeps those of one rank in their order of calls; what is left to do is driven by the caller if it
waits, or by one helper thread for all of a communicator's asynchronous ones.
"""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

from collectives.call import Call
from collectives.progress import CallQueue
from collectives.transport import Transport
from collectives.waiting import PAUSE, Watch

T = TypeVar("T")


class Mail:
    """The point-to-point calls of one communicator on one rank."""

    def __init__(self, queue: CallQueue, transport: Transport) -> None:
        self._queue = queue
        self._transport = transport
        self._changed = threading.Condition()
        self._under_way: list[_Posted] = []
        self._helper: threading.Thread | None = None
        self._ended = False

    def run(self, call: Call[T], line: str) -> T:
        """Runs `call` now, and returns its result. line: what it is counted under."""
        self._queue.enter_beside(call, line)
        try:
            return self._queue.drive(call)
        finally:
            self._queue.leave_beside()

    def submit(self, call: Call[Any], line: str) -> None:
        """Posts `call` now, and has the helper thread see it through."""
        self._queue.enter_beside(call, line)
        posted = _Posted(call, self._queue, self._transport)
        try:
            if posted.advance():
                return
        except BaseException:  # Ctrl-C: whether it was posted, nobody knows
            posted.end()
            raise
        with self._changed:
            self._under_way.append(posted)
            if self._helper is None:
                name = f"collectives-{self._transport.key}-mail"
                self._helper = threading.Thread(target=self._help, name=name, daemon=True)
                self._helper.start()
            self._changed.notify()

    def end(self) -> None:
        """Lets the helper thread end; nothing is under way."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _help(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._ended)
                if not self._under_way:
                    return
                rest = list(self._under_way)
            done = [posted for posted in rest if posted.advance()]
            if done:
                with self._changed:
                    self._under_way = [posted for posted in self._under_way if posted not in done]
            else:
                time.sleep(PAUSE)
            del rest, done  # their arrays belong to whoever waits, not to an idle thread


class _Posted:
    """A call whose steps are taken as they become possible, never waiting."""

    def __init__(self, call: Call[Any], queue: CallQueue, transport: Transport) -> None:
        self._call = call
        self._queue = queue
        self._transport = transport
        self._watch: Watch | None = None

    def advance(self) -> bool:
        """Takes what steps can be taken; True once the call is finished, well or not."""
        call = self._call
        try:
            while call.test is None or call.test():
                call.test = next(call.steps)
                self._watch = Watch(call.test, call, self._transport)
            assert self._watch is not None
            self._watch.look_around()
            return False
        except StopIteration as end:
            call.finish(end.value, None)
        except Exception as error:
            self._queue.fail(call, error)
        self._queue.leave_beside()
        return True

    def end(self) -> None:
        """Gives the call up."""
        self._queue.fail(self._call, KeyboardInterrupt())
        self._queue.leave_beside()
