"""`breakpoint()` in a rank: pdb on one rank of the job, with all time limits suspended while its prompt is open.

Quitting it ends the job as Ctrl-C does, because a rank that leaves in the middle would leave the others waiting. On the
other ranks `breakpoint()` does nothing: they wait in the next collective.
"""

from __future__ import annotations

import importlib.util
import os
import pdb
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from collectives.world import DEBUG_RANK, PASSED_AT, PAUSE_FD, TERMINAL_FD, report

# s; the debug rank is as a rule about to come to the same breakpoint, and may never.
_SOON, _LIMIT = 3.0, 6.0
_LOOK = 0.02
# s; within which the launcher ends a job that was quit
_PATIENCE = 20.0

_count = 0  # breakpoints of this rank so far
_lock = threading.Lock()


def stop_at(frame: FrameType, header: str | None = None) -> None:
    """What `breakpoint()` does in `frame`. header: printed before the prompt, as by `pdb.set_trace`"""
    global _count
    with _lock:
        _count += 1
        number = _count
    mine, debugged = int(os.environ["RANK"]), int(os.environ.get(DEBUG_RANK, "0"))
    if mine != debugged:
        _wait(mine, debugged, number, _place(frame))
        return
    debugger = _Debugger(mine, number)
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame)  # the last word: from here on every line is traced


def _wait(mine: int, debugged: int, number: int, place: str) -> None:
    """Returns when the debug rank has gone on from its breakpoint `number`, or does not come to it."""
    waited, told = 0.0, False
    while not _passed(number):
        if waited >= _LIMIT:
            _say(f"rank {mine} goes on from breakpoint() at {place}: rank {debugged} has not come to one")
            return
        if waited >= _SOON and not told:
            told = True
            _say(
                f"rank {mine} waits in breakpoint() at {place} for rank {debugged}, {_LIMIT - _SOON:g} s at most: "
                f"--debug-rank {mine} gives it the terminal"
            )
        time.sleep(_LOOK)
        if not _word(0):  # somebody is in the debugger: that takes its time
            waited += _LOOK


def _passed(number: int) -> bool:
    return PAUSE_FD not in os.environ or _word(PASSED_AT) >= number


def _word(at: int) -> int:
    return int.from_bytes(os.pread(int(os.environ[PAUSE_FD]), 8, at), sys.byteorder)


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _say(text: str) -> None:
    print(f"ddp-launch: {text}", file=sys.__stderr__, flush=True)


class _Ended(BaseException):
    """The job is being ended while the prompt is open. pdb itself takes KeyboardInterrupt for a slip of the user."""


class _Terminal:
    """While entered, standard input and output are the terminal on which lines can be edited.

    fd: of the terminal, None if there is none, or the program has put something else in the place of the streams
    """

    def __init__(self) -> None:
        ours = sys.stdin is sys.__stdin__ and sys.stdout is sys.__stdout__
        editor = importlib.util.find_spec("readline") is not None  # a part of Python that not every system has
        self.fd = int(os.environ[TERMINAL_FD]) if ours and editor and TERMINAL_FD in os.environ else None

    def __enter__(self) -> None:
        if self.fd is None:
            return
        import readline
        import termios

        # A rank that is killed could not switch it off again.
        readline.parse_and_bind("set enable-bracketed-paste off")
        modes = termios.tcgetattr(self.fd)
        modes[1] &= ~termios.OPOST  # the launcher's terminal does that
        termios.tcsetattr(self.fd, termios.TCSANOW, modes)
        sys.stdout.flush()
        self._kept = [os.dup(0), os.dup(1)]
        for fd in (0, 1):
            os.dup2(self.fd, fd)
        report(editing=True)

    def __exit__(self, *exc: object) -> None:
        if self.fd is None:
            return
        sys.stdout.flush()
        for fd, kept in enumerate(self._kept):
            os.dup2(kept, fd)
            os.close(kept)
        report(editing=False)


class _Debugger(pdb.Pdb):
    """pdb, on a terminal with editing of lines where there is one.

    number: of the breakpoint at which it begins
    """

    def __init__(self, rank: int, number: int) -> None:
        self._terminal = _Terminal()
        # pdb edits lines if it is given no streams. Ctrl-C is the launcher's, before and after.
        streams = (sys.__stdin__, sys.__stdout__) if self._terminal.fd is None else (None, None)
        super().__init__(stdin=streams[0], stdout=streams[1], nosigint=True)
        self._rank = rank
        self._number: int | None = number
        self._where = ""

    def interaction(self, frame: Any, *more: Any) -> None:
        """One stop, from prompt to prompt's end."""
        self._where = "" if frame is None else f" at {_place(frame)}"
        in_main = threading.current_thread() is threading.main_thread()
        report(debugging=True)
        before = signal.signal(signal.SIGINT, _end) if in_main else None
        try:
            with self._terminal:
                super().interaction(frame, *more)
        except _Ended:
            ended = True
        else:
            ended = False
        finally:
            if in_main:
                signal.signal(signal.SIGINT, before)
            # Once it runs again the others may, too: what it does next may need them.
            if self._number is not None:
                report(passed=self._number)
                self._number = None
            report(debugging=False)
        if ended:
            signal.raise_signal(signal.SIGINT)  # what the program makes of it

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
        Not here: q(uit), and start the job again.
        """
        self.error("A rank cannot be restarted on its own: quit, and start the job again.")

    do_restart = do_run

    def _quit(self, why: str) -> bool:
        report(quit=why)
        if threading.current_thread() is not threading.main_thread():
            sys.exit()  # of this thread; the main thread gets the signal
        time.sleep(_PATIENCE)  # until the launcher sends SIGINT
        return True


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended
