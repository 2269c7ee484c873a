"""`breakpoint()` in a rank: pdb on one rank of the job, with all time limits paused while its prompt is open.

Quitting the debugger ends the whole job, as Ctrl-C does: otherwise the other ranks would wait for this rank. On the
other ranks `breakpoint()` only prints a note, once for each line. They wait for the debugged rank in the next
collective.
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

# After its debugger was quit, a rank waits for the launcher's SIGINT for at most this long (s). Then it ends by itself.
_SHUTDOWN_LIMIT = 20.0
# Locations of the `breakpoint()` calls for which this rank has printed its note.
_passed: set[str] = set()


def stop_at(frame: FrameType, header: str | None = None) -> None:
    """On the rank to debug, opens pdb in `frame`; elsewhere prints a note. header: printed before pdb's prompt"""
    rank = int(os.environ["RANK"])
    if rank != int(os.environ.get(DEBUG_RANK, "0")):
        location = _location(frame)
        if location not in _passed:
            _passed.add(location)
            print(
                f"ddp-launch: rank {rank} passes breakpoint() at {location}: --debug-rank {rank} gives it the debugger",
                file=sys.__stderr__,
                flush=True,
            )
        return
    debugger = _Debugger(rank)
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame)  # The last statement, because every later one would be traced.


def _location(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _JobEnded(BaseException):
    """Raised at SIGINT while the prompt is open: the job ends. After a KeyboardInterrupt, pdb would prompt again."""


class _Debugger(pdb.Pdb):
    """pdb on the rank's standard streams. While its prompt is open, the job's time limits are paused."""

    def __init__(self, rank: int) -> None:
        # nosigint: pdb sets no SIGINT handler when the program continues. The launcher handles Ctrl-C.
        super().__init__(stdin=sys.__stdin__, stdout=sys.__stdout__, nosigint=True)
        self._rank = rank
        self._at = ""

    def interaction(self, frame: Any, *more: Any) -> None:
        """Prompts until the user continues the program. pdb calls this at every stop."""
        self._at = "" if frame is None else f" at {_location(frame)}"
        in_main = threading.current_thread() is threading.main_thread()
        report(debugging=True)
        handler = signal.signal(signal.SIGINT, _raise_job_ended) if in_main else None
        ended = False
        try:
            super().interaction(frame, *more)
        except _JobEnded:
            ended = True
        finally:
            if in_main:
                signal.signal(signal.SIGINT, handler)
            report(debugging=False)
        if ended:
            signal.raise_signal(signal.SIGINT)  # Raises KeyboardInterrupt in the program, which may catch it.

    def do_quit(self, arg: str) -> bool:
        """q(uit) | exit
        Ends the job, as Ctrl-C does.
        """
        return self._quit(f"rank {self._rank}'s debugger was quit{self._at}")

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """EOF
        The end of standard input ends the job.
        """
        self.message("")
        return self._quit(f"rank {self._rank} stands in breakpoint(){self._at}, and standard input has ended")

    def do_run(self, arg: str) -> None:
        """run | restart
        Not available. Quit (q), and start the job again.
        """
        self.error("A rank cannot be restarted on its own: quit, and start the job again.")

    do_restart = do_run

    def _quit(self, why: str) -> bool:
        report(quit=why)
        if threading.current_thread() is not threading.main_thread():
            sys.exit()  # Ends this thread; the main thread gets the launcher's signal.
        time.sleep(_SHUTDOWN_LIMIT)  # The launcher's SIGINT interrupts this.
        self.set_quit()  # No signal has come: ends the program by BdbQuit, as pdb does.
        return True


def _raise_job_ended(number: int, frame: FrameType | None) -> None:
    raise _JobEnded
