"""Python stacks of a rank that may not respond: a signal has `faulthandler` write them, in C, wherever the rank is.

The text goes to memory that rank and agent share (a pipe could be full, and would block the rank). Nothing marks its
end: it is complete when it has not grown for a moment.
"""

from __future__ import annotations

import os
import re

from launcher.agent.heartbeat import Heartbeat
from launcher.agent.rank import STACKS, STACKS_NAME
from launcher.linux import read_text

#: How often to look (s) while a text is awaited.
LOOK = 0.01
_LIMIT = 1.0  # s; the rank's threads may all be kept from their cores for a while
_QUIET = 0.1  # s without growth
_MOST = 1 << 22  # bytes; more than faulthandler writes of a hundred threads


class Stacks:
    """Collects the stacks of one rank on request.

    fd: of the shared memory
    """

    def __init__(self, pid: int, fd: int, heartbeat: Heartbeat) -> None:
        self._pid = pid
        self._fd = fd
        self._heartbeat = heartbeat
        self._until: float | None = None
        self._size = 0
        self._grown = 0.0

    @property
    def awaited(self) -> bool:
        """A text is to come; `look` every LOOK seconds."""
        return self._until is not None

    def ask(self, now: float) -> str | None:
        """Has the rank write its stacks; the text at once if it says only why there are none. now: monotonic, s"""
        if self._until is not None:
            return None  # a second request gets no text of its own
        reason = self._why_not()
        if reason is not None:
            return f"{reason}; {self._heartbeat.stood()}\n"
        os.ftruncate(self._fd, 0)
        self._until, self._size, self._grown = now + _LIMIT, 0, now
        os.kill(self._pid, STACKS)
        return None

    def look(self, now: float) -> str | None:
        """The text, once it is complete; a reason why there is none when its time is over. now: monotonic, s"""
        assert self._until is not None
        size = os.fstat(self._fd).st_size
        if size != self._size:
            self._size, self._grown = size, now
        data = os.pread(self._fd, _MOST, 0)
        if (not data or now - self._grown < _QUIET) and now < self._until:
            return None
        self._until = None
        if data:
            return data.decode(errors="replace")
        state = self._heartbeat.state()
        how = f"within {_LIMIT:g} s" + (f" (its state is {state})" if state else ", it has ended")
        return f"it did not write its stacks {how}; {self._heartbeat.stood()}\n"

    def _why_not(self) -> str | None:
        """Why the rank cannot write its stacks, None if nothing speaks against it."""
        state = self._heartbeat.state()
        if state in ("", "Z"):
            return "it has ended"
        if state == "T":
            return "it is stopped and cannot write its stacks"
        try:
            if not os.readlink(f"/proc/{self._pid}/fd/{self._fd}").startswith(f"/memfd:{STACKS_NAME}"):
                return "it has closed the file for its stacks"
        except OSError:
            return "it has closed the file for its stacks, or may not be looked into"
        if not catches(read_text(f"/proc/{self._pid}/status"), STACKS):  # the signal would kill it
            return "it writes no stacks: it is another program now, or about to end"
        return None


def catches(status: str, number: int) -> bool:
    """True if a process has a handler for the signal, by its /proc/PID/status.

    >>> import signal
    >>> catches("SigIgn:\\t0000000001001000\\nSigCgt:\\t0000000000000002\\n", signal.SIGINT)
    True
    """
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number - 1 & 1)
