"""On a terminal: rank 0's progress bar repaints the lowest line, everything else is printed above it."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.launcher.conftest import LAUNCH
from tests.launcher.console.terminal_emulator import Glass, open_terminal

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]
ENDING = "ddp-launch: Ctrl-C: ending the job (once more kills it at once)"


def as_seen(text: str) -> list[str]:
    """What a terminal shows that got this."""
    glass = Glass(200)
    glass.feed(text.replace("\n", "\r\n"))
    return glass.lines


def start_on_a_terminal(start_job: Any, args: list[str], echo: bool = False) -> tuple[Any, int]:
    """Starts a command on a terminal of 24 x 60; the job, and the terminal's other side. echo: keys are shown"""
    master, slave = open_terminal()
    attributes = termios.tcgetattr(slave)
    if not echo:
        attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    # A session of its own with this terminal, as a shell's foreground job has; whoever runs the tests may have nohup.
    code = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *args]
    job = start_job(command, stdin=slave, stdout=slave, stderr=slave, env={"TERM": "xterm", "NO_COLOR": ""})
    os.close(slave)
    return job, master


def on_a_terminal(
    start_job: Any, args: list[str], keys: dict[bytes, bytes] | None = None, echo: bool = False
) -> tuple[int, str]:
    """Runs a command on a terminal; its exit code and what the terminal got.

    keys: what is typed in once the terminal shows this; echo: the terminal shows them
    """
    waiting = dict(keys or {})
    job, master = start_on_a_terminal(start_job, args, echo)
    seen = b""
    while True:
        for after in [each for each in waiting if each in seen]:
            os.write(master, waiting.pop(after))
        try:
            data = os.read(master, 1 << 16)
        except OSError:
            break  # all have closed it
        seen += data
    os.close(master)
    status = job.process.wait(20)
    job.assert_gone()
    return status, seen.decode().replace("\r\n", "\n")


def test_tqdms_bar_of_rank_0_is_as_wide_as_the_terminal(start_job: Any, script: Any) -> None:
    path = script(
        """
        from collectives.progress_bar import progress_bar
        if rank == 1: print(os.environ["COLUMNS"], os.environ["LINES"])
        for _ in progress_bar(range(3)): time.sleep(0.2)
        """
    )
    status, seen = on_a_terminal(start_job, [*LAUNCH, "-n", "2", path])
    assert status == 0
    bar, line = sorted(as_seen(seen))  # no bar of rank 1's
    assert line == "1: 57 24"
    assert re.match(r"0: 100%\|.* 3/3 ", bar)
    assert len(bar) == 59


def test_a_world_of_one_has_the_terminal_to_itself(start_job: Any, script: Any) -> None:
    path = script("name = input('name? ')\nprint('hello', name)\nsys.stdout.write('\\rbar')\nsys.exit(3)")
    status, seen = on_a_terminal(start_job, [*LAUNCH, path], {b"name? ": b"Ann\n"})
    assert status == 3
    assert seen.startswith("name? hello Ann\n\rbar\nddp-launch: rank 0 (pid ")


def test_a_prompt_of_rank_0_its_answer_and_ctrl_c(start_job: Any, script: Any) -> None:
    path = script("if rank == 0: print('hello', input('name? '))\ntime.sleep(60)")
    command = [*LAUNCH, "-n", "2", path]
    status, seen = on_a_terminal(start_job, command, {b"name? ": b"Ann\n", b"hello Ann": b"\x03"}, echo=True)
    assert status == 130
    assert as_seen(seen.replace("^C", "")) == ["0: name? Ann", "0: hello Ann", ENDING]


def test_ctrl_c_under_a_bar_ends_with_the_reason(start_job: Any, script: Any) -> None:
    path = script("if rank == 0: print('\\rbar 7 %', end='')\ntime.sleep(60)")
    command = [sys.executable, "-u", "-m", "launcher", "-n", "2", path]
    status, seen = on_a_terminal(start_job, command, {b"bar 7 %": b"\x03"})
    assert status == 130
    assert as_seen(seen.replace("^C", "")) == [ENDING, "0: bar 7 %", "ddp-launch: ended by Ctrl-C"]


def test_when_the_terminal_goes_away_ranks_are_asked_to_end(start_job: Any, script: Any, tmp_path: Path) -> None:
    path = script(
        """
        from pathlib import Path
        def save(number, frame):
            print("\\rbar", end="")
            Path(sys.argv[1], f"saved-{rank}").touch()
            sys.exit(1)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, save)
        Path(sys.argv[1], f"up-{rank}").touch()
        while True:
            time.sleep(0.1)
        """
    )
    command = [*LAUNCH, "-n", "2", "--grace", "30", path, str(tmp_path)]
    job, master = start_on_a_terminal(start_job, command)
    wait_until(lambda: len([*tmp_path.glob("up-*")]) == 2)
    os.close(master)
    assert job.process.wait(30) in (128 + signal.SIGHUP, 128 + signal.SIGPIPE)
    job.assert_gone()
    assert len(list(tmp_path.glob("saved-*"))) == 2
