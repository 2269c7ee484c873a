"""`breakpoint()` in a rank: pdb on one rank of the job, with all time limits suspended while its prompt is open.

Quitting it ends the job as Ctrl-C does, because a rank that leaves in the middle would leave the others waiting. On the
other ranks `breakpoint()` says that it does nothing: they wait for the debugged rank in the next collective.
"""

from __future__ import annotations

import os
import pdb
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from collectives.world import DEBUG_RANK, report

# s; within which the launcher ends a job that was quit
_SHUTDOWN_LIMIT = 20.0
_passed: set[str] = set()  # breakpoints that this rank has reported to pass


def stop_at(frame: FrameType, header: str | None = None) -> None:
    """What `breakpoint()` does in `frame`. header: printed before the prompt, as by `pdb.set_trace`"""
    mine, debugged = int(os.environ["RANK"]), int(os.environ.get(DEBUG_RANK, "0"))
    if mine != debugged:
        location = _location(frame)
        if location not in _passed:
            _passed.add(location)
            text = f"rank {mine} passes breakpoint() at {location}: --debug-rank {mine} gives it the debugger"
            print(f"ddp-launch: {text}", file=sys.__stderr__, flush=True)
        return
    debugger = _Debugger(mine)
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame)  # last: from here on every line is traced


def _location(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _Ended(BaseException):
    """The job is being ended while the prompt is open. pdb itself takes KeyboardInterrupt for a slip of the user."""


class _Debugger(pdb.Pdb):
    """pdb on the rank's own standard streams, which suspends the job's time limits while its prompt is open."""

    def __init__(self, rank: int) -> None:
        # Ctrl-C is the launcher's, before and after.
        super().__init__(stdin=sys.__stdin__, stdout=sys.__stdout__, nosigint=True)
        self._rank = rank
        self._where = ""

    def interaction(self, frame: Any, *more: Any) -> None:
        """One stop, from its first prompt to its last."""
        self._where = "" if frame is None else f" at {_location(frame)}"
        in_main = threading.current_thread() is threading.main_thread()
        report(debugging=True)
        before = signal.signal(signal.SIGINT, _end) if in_main else None
        ended = False
        try:
            super().interaction(frame, *more)
        except _Ended:
            ended = True
        finally:
            if in_main:
                signal.signal(signal.SIGINT, before)
            report(debugging=False)
        if ended:
            signal.raise_signal(signal.SIGINT)  # the program may catch it

    def do_quit(self, arg: str) -> bool:
        """q(uit) | exit
        Ends the job, as Ctrl-C does.
        """
        return self._quit(f"rank {self._rank}'s debugger was quit{self._where}")

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """EOF
        The end of standard input ends the job.
        """
        self.message("")
        return self._quit(f"rank {self._rank} stands in breakpoint(){self._where}, and standard input has ended")

    def do_run(self, arg: str) -> None:
        """run | restart
        Not available: q(uit), and start the job again.
        """
        self.error("A rank cannot be restarted on its own: quit, and start the job again.")

    do_restart = do_run

    def _quit(self, why: str) -> bool:
        report(quit=why)
        if threading.current_thread() is not threading.main_thread():
            sys.exit()  # of this thread; the main thread gets the signal
        time.sleep(_SHUTDOWN_LIMIT)  # until the launcher sends SIGINT
        return True


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended
