"""A debugger at a terminal: lines are edited in the rank, and the terminal is as it was whenever nobody debugs."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.conftest import LAUNCH, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

BODY = "number = 6\nnumerous = 7\nbreakpoint()\nprint('went', 'on')\ntime.sleep(0.1)"
# A session of its own with this terminal, as a shell's foreground job has.
SHELL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A job on a terminal, and who types there."""

    def __init__(self, start_job: Any, path: str, n: int) -> None:
        self.master, self.slave = pty.openpty()
        self.modes = termios.tcgetattr(self.slave)
        command = [sys.executable, "-c", SHELL, *LAUNCH, "-n", str(n), "--no-status", path]
        ends = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.job = start_job(command, **ends, env={"TERM": "xterm", "NO_COLOR": "1", "INPUTRC": "/dev/null"})

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait(self, word: str) -> str:
        return wait_for(self.master, word, 1).replace("\r", "")

    def edited(self) -> bool:
        """Keys go on one by one."""
        return not termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)

    def become(self, edited: bool) -> None:
        deadline = time.monotonic() + 10
        while self.edited() is not edited:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> int:
        """The exit code; the terminal's modes must be those of before."""
        status: int = self.job.process.wait(20)
        self.job.assert_gone()
        assert termios.tcgetattr(self.slave) == self.modes
        return status

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def sit_down(start_job: Any, script: Callable[[str], str]) -> Iterator[Callable[..., Terminal]]:
    """Starts a script of these lines on a terminal, and waits until the debugger's prompt is there."""
    terminals = []

    def sit(body: str = BODY, n: int = 2) -> Terminal:
        terminals.append(Terminal(start_job, script(body), n))
        terminals[-1].wait("(Pdb) ")
        terminals[-1].become(edited=True)
        return terminals[-1]

    yield sit
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize("n", [1, 2])
def test_lines_are_edited(sit_down: Any, n: int) -> None:
    terminal = sit_down(n=n)
    terminal.type("p number * 77\x7f\n")  # backspace
    assert "\n42\n" in terminal.wait("(Pdb) ")
    terminal.type("\x1b[A + 1\n")  # the line before, and more
    assert "\n43\n" in terminal.wait("(Pdb) ")
    terminal.type("p numero\t\n")  # completed
    assert "\n7\n" in terminal.wait("(Pdb) ")
    terminal.type("c\n")
    assert terminal.wait("went on").startswith("c\n")
    assert terminal.end() == 0


ENDS = {"q\n": 130, "\x04": 130, "\x03": 130, "import os; os.kill(os.getpid(), 9)\n": 137}


@pytest.mark.parametrize("keys", ENDS, ids=["quit", "Ctrl-D", "Ctrl-C", "kill"])
def test_the_terminal_is_restored_however_it_ends(sit_down: Any, keys: str) -> None:
    terminal = sit_down()
    terminal.type(keys)
    assert terminal.wait("ddp-launch: ")
    assert terminal.end() == ENDS[keys]


def test_a_launcher_that_is_killed_leaves_a_terminal_in_order(sit_down: Any) -> None:
    terminal = sit_down()
    terminal.job.process.kill()
    terminal.become(edited=False)
    assert terminal.end() == -signal.SIGKILL


def test_the_modes_that_a_shell_has_set_meanwhile_are_its_own(sit_down: Any) -> None:
    terminal = sit_down()
    shells = termios.tcgetattr(terminal.slave)
    shells[0] &= ~termios.ICRNL
    termios.tcsetattr(terminal.slave, termios.TCSANOW, shells)
    terminal.job.process.kill()
    terminal.job.process.wait(20)
    terminal.job.assert_gone()
    assert termios.tcgetattr(terminal.slave) == shells


def test_the_terminal_is_the_shells_while_the_job_is_suspended(sit_down: Any) -> None:
    terminal = sit_down()
    terminal.type("p num")
    terminal.wait("p num")
    terminal.type("\x1a")
    terminal.become(edited=False)
    assert termios.tcgetattr(terminal.slave) == terminal.modes
    launcher = terminal.job.process.pid
    deadline = time.monotonic() + 10
    while Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher, signal.SIGCONT)
    terminal.become(edited=True)
    terminal.type("ber\n")
    assert "\n6\n" in terminal.wait("(Pdb) ")
    terminal.type("c\n")
    assert terminal.end() == 0


def test_between_prompts_input_comes_in_lines(sit_down: Any) -> None:
    terminal = sit_down("breakpoint()\nname = input('name? ')\nbreakpoint()\ntime.sleep(0.1)", n=1)
    terminal.type("c\n")
    terminal.wait("name? ")
    terminal.become(edited=False)
    terminal.type("Annx\x7f\n")
    terminal.wait("(Pdb) ")
    terminal.become(edited=True)
    terminal.type("p 'It is ' + name\n")
    assert "'It is Ann'" in terminal.wait("(Pdb) ")
    terminal.type("c\n")
    assert terminal.end() == 0


def test_output_that_is_redirected_gets_a_plain_debugger(start_job: Any, script: Any) -> None:
    terminal = Terminal(start_job, script("import io\nsys.stdin = io.StringIO()\n" + BODY), 1)
    terminal.wait("(Pdb) ")
    assert not terminal.edited()
    terminal.type("p number\n")
    assert "\n6\n" in terminal.wait("(Pdb) ")
    terminal.type("c\n")
    terminal.wait("went on")
    assert terminal.end() == 0
    terminal.close()
