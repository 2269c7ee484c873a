"""Python stacks of a rank that may not respond: a signal makes `faulthandler` write them in C, even if the GIL is held.

They are written to memory that rank and agent share; a pipe could be full, and would block the rank. Nothing marks the
end of the text: it counts as complete when it has not grown for a moment.
"""

from __future__ import annotations

import os
import re

from launcher.agent.heartbeat import RankReader
from launcher.agent.rank import STACKS, STACKS_NAME
from launcher.linux import read_text, stat_of

#: Interval at which `Stacks.poll` is called while stacks are pending (s).
POLL_INTERVAL = 0.01
# Seconds that a rank has to write its stacks: its threads may wait for a core for a while.
_TIME_LIMIT = 1.0
# A text that has not grown for so long is complete (s).
_QUIET = 0.1
# Maximum number of bytes that are read. faulthandler writes at most a hundred threads, which hardly ever need more.
_MAX_BYTES = 1 << 22


class Stacks:
    """Collects the stacks of one rank on request.

    fd: of the shared memory, in the agent and in the rank
    """

    def __init__(self, pid: int, fd: int, rank_reader: RankReader) -> None:
        self._pid = pid
        self._fd = fd
        self._rank_reader = rank_reader
        self._deadline: float | None = None
        self._size = 0
        self._grown_at = 0.0

    @property
    def pending(self) -> bool:
        """Whether stacks were requested and have not come yet. While True, call `poll` every POLL_INTERVAL."""
        return self._deadline is not None

    def request(self, now: float) -> str | None:
        """Makes the rank write its stacks. Returns: the reason if it cannot, else None. now: monotonic, s"""
        if self._deadline is not None:
            return None  # One answer serves both requests.
        reason = self._why_impossible()
        if reason is not None:
            return f"{reason}; {self._rank_reader.last_position()}\n"
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)  # The rank writes at this offset, which it shares with the agent.
        self._deadline = now + _TIME_LIMIT
        self._size = 0
        self._grown_at = now
        os.kill(self._pid, STACKS)
        return None

    def poll(self, now: float) -> str | None:
        """Returns the stacks, or the reason why none came; None while they are incomplete and the time is not over.

        now: monotonic, s
        """
        assert self._deadline is not None
        size = os.fstat(self._fd).st_size
        if size != self._size:
            self._size = size
            self._grown_at = now
        data = os.pread(self._fd, _MAX_BYTES, 0)
        if (not data or now - self._grown_at < _QUIET) and now < self._deadline:
            return None
        self._deadline = None
        if data:
            return data.decode(errors="replace")
        state = stat_of(self._pid).state
        why = f" (its state is {state})" if state else ", it has ended"
        return f"it did not write its stacks within {_TIME_LIMIT:g} s{why}; {self._rank_reader.last_position()}\n"

    def _why_impossible(self) -> str | None:
        """Why the rank cannot write its stacks; None if it can."""
        state = stat_of(self._pid).state
        if state in ("", "Z"):
            return "it has ended"
        if state == "T":
            return "it is stopped and cannot write its stacks"
        try:
            if not os.readlink(f"/proc/{self._pid}/fd/{self._fd}").startswith(f"/memfd:{STACKS_NAME}"):
                return "it has closed the file for its stacks"
        except OSError:
            return "it has closed the file for its stacks, or may not be looked into"
        # Without a handler the signal would kill the process.
        if not catches(read_text(f"/proc/{self._pid}/status"), STACKS):
            return "it writes no stacks: it is another program now, or about to end"
        return None


def catches(status: str, number: int) -> bool:
    """True if a process has a handler for signal `number`. status: the text of its /proc/PID/status

    >>> import signal
    >>> catches("SigIgn:\\t0000000001001000\\nSigCgt:\\t0000000000000002\\n", signal.SIGINT)
    True
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> number - 1 & 1)
