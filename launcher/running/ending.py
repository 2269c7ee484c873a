"""The end of a job: the ranks are asked to end, and killed when their time is over."""

from __future__ import annotations

import math
import signal

from launcher.running.clocks import Clocks
from launcher.running.crew import Crew
from launcher.running.observer import Observer
from launcher.wire import Message

# Killed ranks are reported within milliseconds, unless their keeper is stopped or gone: then the guard ends everything.
_KILL_LIMIT = 0.5
# s; one wish may come twice: `timeout` of the coreutils signals its child, and then its child's whole group.
_TWICE = 0.1


class Ending:
    """Whether a job ends, and how far that is. Clocks: "kill" is when `kill` must be called, "sweep" when all is over.

    begun: it ends; killed: there is no more asking; stopped: the signal by which the user ended it, else 0
    order: what ranks that come late are told
    """

    def __init__(self, crew: Crew, clocks: Clocks, observers: Observer) -> None:
        self.begun = self.killed = False
        self.stopped = 0
        self._stopped_at = -math.inf
        self.order: Message | None = None
        self._crew, self._clocks, self._observers = crew, clocks, observers

    def stop(self, number: int, now: float, grace: float) -> None:
        """The user ends the job by this signal; SIGPIPE: by not reading on."""
        self.stopped, self._stopped_at = number, now
        self.begin(number if number != signal.SIGPIPE else signal.SIGTERM, now, grace)

    def is_same_wish(self, now: float) -> bool:
        """Whether a signal that comes now is the one by which the user has ended the job, once more."""
        return now - self._stopped_at <= _TWICE

    def begin(self, number: int, now: float, grace: float) -> None:
        """The ranks are asked to end, by a signal, and have `grace` seconds for it."""
        if not self.begun:
            self._observers.ending()
        self.begun = True
        self.order = {"signal": number}
        self._clocks.clear()
        self._clocks.put("kill", now, grace)
        # A rank that raised or exits is on its way out, through its exit handlers.
        self._crew.tell(self.order, lambda member: not member.over and not member.leaving)

    def kill(self, now: float, limit: float = _KILL_LIMIT) -> None:
        """No more asking. limit: seconds until all is taken to be over, whatever is heard of it"""
        self.begun = self.killed = True
        self.order = {"kill": True}
        self._clocks.clear()
        self._clocks.put("sweep", now, limit)
        self._crew.tell(self.order, lambda member: not member.over)
