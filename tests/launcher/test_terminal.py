"""On a terminal: rank 0's progress bar repaints the lowest line, everything else is printed above it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from typing import Any

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def on_a_terminal(start_job: Any, args: list[str], keys: bytes = b"", after: bytes = b"") -> tuple[int, str]:
    """Runs a command on a terminal of 24 x 60; its exit code and what the terminal got.

    keys: typed in once the terminal shows `after`
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    attributes = termios.tcgetattr(slave)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    # A session of its own with this terminal, as a shell's foreground job has.
    code = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *args]
    job = start_job(command, stdin=slave, stdout=slave, stderr=slave, env={"TERM": "xterm", "NO_COLOR": ""})
    os.close(slave)
    seen = b""
    while True:
        if keys and after in seen:
            os.write(master, keys)
            keys = b""
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
    for i in range(3):
        assert f"{zero}step {i}{erase}" in seen
    assert f"{erase}{one}from another rank\n{zero}step " in seen
    assert f"{zero}step 3\n" in seen  # the finished bar stays
    assert f"{one}step 3\n" in seen
    assert "1: \x1b[0mstep 2" not in seen  # another rank's bar is shown only when it is done
    assert f"{zero}57 24\n" in seen  # as wide as the terminal, less the prefix


def test_a_world_of_one_has_the_terminal_to_itself(start_job: Any, script: Any) -> None:
    path = script("name = input('name? ')\nprint('hello', name)\nsys.stdout.write('\\rbar')\nsys.exit(3)")
    status, seen = on_a_terminal(start_job, [sys.executable, "-m", "launcher", path], keys=b"Ann\n")
    assert status == 3
    assert seen.startswith("name? hello Ann\n\rbar\nddp-launch: rank 0 (pid ")


def test_ctrl_c_on_a_terminal(start_job: Any, script: Any) -> None:
    path = script("print('ready') if rank == 0 else None\ntime.sleep(60)")
    command = [sys.executable, "-m", "launcher", "-n", "2", path]
    status, seen = on_a_terminal(start_job, command, keys=b"\x03", after=b"ready")
    assert status == 130
    assert seen.splitlines()[1].replace("^C", "") == "ddp-launch: Ctrl-C: ending the job (once more kills it at once)"
    assert len(seen.splitlines()) == 2
