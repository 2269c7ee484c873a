"""On a terminal: rank 0's progress bar repaints the lowest line, everything else is printed above it."""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.console.terminal_emulator import Glass, open_terminal

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


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


def test_a_progress_bar_repaints_one_line(start_job: Any, script: Any) -> None:
    path = script(
        """
        if rank == 1:
            time.sleep(0.25)
            print("from another rank")
        for i in range(4):
            print(f"\\rstep {i}", end="", file=sys.stderr)
            time.sleep(0.2)
        print(file=sys.stderr)
        print(os.environ["COLUMNS"], os.environ["LINES"])
        """
    )
    status, seen = on_a_terminal(start_job, [sys.executable, "-m", "launcher", "-n", "2", path])
    assert status == 0
    zero, one = "\x1b[36m0: \x1b[0m", "\x1b[33m1: \x1b[0m"
    erase = "\r\x1b[K"
    assert any(f"{zero}step {i}{erase}" in seen for i in range(3))  # a busy machine may skip a state, never all
    between = f"{one}from another rank\n{zero}step "
    assert f"{erase}{between}" in seen or seen.startswith(between)  # there, a busy machine had kept the bar waiting
    assert f"{zero}step 3\n" in seen  # the finished bar stays
    assert f"{one}step 3\n" in seen
    assert "1: \x1b[0mstep 2" not in seen  # another rank's bar is shown only when it is done
    assert f"{zero}57 24\n" in seen  # as wide as the terminal, less the prefix


def test_tqdms_bar_of_rank_0_is_as_wide_as_the_terminal(start_job: Any, script: Any) -> None:
    path = script("from collectives.progress_bar import progress_bar\nfor _ in progress_bar(range(3)): time.sleep(0.2)")
    status, seen = on_a_terminal(start_job, [sys.executable, "-m", "launcher", "-n", "2", path])
    assert status == 0
    (bar,) = as_seen(seen)
    assert bar.startswith("0: 100%|")
    assert "3/3" in bar
    assert len(bar) == 59


def test_a_world_of_one_has_the_terminal_to_itself(start_job: Any, script: Any) -> None:
    path = script("name = input('name? ')\nprint('hello', name)\nsys.stdout.write('\\rbar')\nsys.exit(3)")
    status, seen = on_a_terminal(start_job, [sys.executable, "-m", "launcher", path], {b"name? ": b"Ann\n"})
    assert status == 3
    assert seen.startswith("name? hello Ann\n\rbar\nddp-launch: rank 0 (pid ")


def test_a_prompt_of_rank_0_its_answer_and_ctrl_c(start_job: Any, script: Any) -> None:
    path = script("if rank == 0: print('hello', input('name? '))\ntime.sleep(60)")
    command = [sys.executable, "-m", "launcher", "-n", "2", path]
    status, seen = on_a_terminal(start_job, command, {b"name? ": b"Ann\n", b"hello Ann": b"\x03"}, echo=True)
    assert status == 130
    end = "ddp-launch: Ctrl-C: ending the job (once more kills it at once)"
    assert as_seen(seen.replace("^C", "")) == ["0: name? Ann", "0: hello Ann", end]


def test_ctrl_c_under_a_bar_ends_with_the_reason(start_job: Any, script: Any) -> None:
    path = script("if rank == 0: print('\\rbar 7 %', end='')\ntime.sleep(60)")
    command = [sys.executable, "-u", "-m", "launcher", "-n", "2", path]
    status, seen = on_a_terminal(start_job, command, {b"bar 7 %": b"\x03"})
    assert status == 130
    ending = "ddp-launch: Ctrl-C: ending the job (once more kills it at once)"
    assert as_seen(seen.replace("^C", "")) == [ending, "0: bar 7 %", "ddp-launch: ended by Ctrl-C"]


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
    command = [sys.executable, "-m", "launcher", "-n", "2", "--grace", "30", path, str(tmp_path)]
    job, master = start_on_a_terminal(start_job, command)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("up-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.close(master)
    assert job.process.wait(30) in (128 + signal.SIGHUP, 128 + signal.SIGPIPE)
    job.assert_gone()
    assert len(list(tmp_path.glob("saved-*"))) == 2
