"""What a process does now, from its flight record, cheaply enough for every second: its newest call, not a thousand.

It imports almost nothing, for the launcher's keeper.
"""

from __future__ import annotations

from collectives.flight.layout import CALL, CALL_SIZE, CALLS, CALLS_AT, QUEUED, STARTED, STATE_BITS, STATES
from collectives.flight.view import View
from collectives.flight.words import name_call, name_site

_ATTEMPTS = 3
_WORDS = CALL_SIZE // 8
_STATE = (1 << STATE_BITS) - 1


class Glance(View):
    """A view of one process's record that reads its newest call alone."""

    def read(self, now: int) -> dict[str, object]:
        """What the process does, for a message. Raises: RecordError if this is no flight record.

        now: of the monotonic clock, ns
        step: that it has finished, None if nothing counts them
        calls: how many it has begun; call: the last one in words, or the one for which it waits; call_on: its
        communicator; call_state: queued, started, done or failed; call_age: seconds in that state. None before any
        where: line and function in which its Python stood, where_age: seconds ago. None if no sample was taken
        """
        begun, found = self._newest()
        message: dict[str, object] = {"step": self.header()[4], "calls": begun}
        message |= dict.fromkeys(("call", "call_on", "call_state", "call_age", "where", "where_age"))
        if found is not None:
            _, communicator, number, signature, queued, started, ended, stamp = found
            name, dtype, shape, more, file, line = self.signature(signature) or ("?", "", "", "", "?", "0")
            state = STATES[stamp & _STATE]
            since = {"queued": queued, "started": started}.get(state, ended)
            message["call"] = name_call(name, number, file, int(line), more, dtype, shape)
            message["call_on"] = self.communicator(communicator)
            message["call_state"], message["call_age"] = state, _seconds(now - since)
        stood = self.position()
        if stood is not None:
            at, (file, line_, function), _ = stood
            message["where"], message["where_age"] = f"{name_site(file, line_)} in {function}", _seconds(now - at)
        return message

    def _newest(self) -> tuple[int, tuple[int, ...] | None]:
        """How many calls have begun, and the words of the newest; of the newest under way, if that one is queued."""
        begun = 0
        for _ in range(_ATTEMPTS):
            stamps = memoryview(self._peek(CALLS_AT, CALLS * CALL_SIZE)).cast("q")[_WORDS - 1 :: _WORDS].tolist()
            newest = max(stamps)
            begun = newest >> STATE_BITS
            if begun == 0:
                return 0, None
            if newest & _STATE == QUEUED:  # what it waits for tells more
                newest = max((stamp for stamp in stamps if stamp & _STATE == STARTED), default=newest)
            index = newest >> STATE_BITS
            words = CALL.unpack(self._peek(CALLS_AT + index % CALLS * CALL_SIZE, CALL_SIZE))
            # Its state may have moved on meanwhile, and is then what it says now; another call may not have come.
            if words[0] == index == words[-1] >> STATE_BITS and words[-1] & _STATE in STATES:
                return begun, words
        return begun, None  # it makes calls faster than we can read


def _seconds(nanoseconds: int) -> float:
    return round(max(0, nanoseconds) / 1e9, 2)
