"""Shell completion, in the shells themselves: at a terminal, as somebody who types would have it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.settings.completion import script

pytestmark = pytest.mark.timeout(60)

# What is typed, and what completes its last word. Both `=` and a blank may stand before a value.
CASES = [
    ("--ho", ["--hostfile", "--hosts"]),
    ("-n 2 --hel", ["--help", "--help-all"]),
    ("-n g", ["gpu"]),
    ("--engine o", ["openmpi"]),
    ("--engine=o", ["openmpi"]),
    ("--grace 3 --backend n", ["nccl"]),
    ("--hang-timeout o", ["off"]),
    ("--set hang", ["hang_timeout"]),
    ("--set gra", ["grace"]),
    ("--completion f", ["fish"]),
    ("--config jo", ["job.toml"]),
    ("--log-dir lo", ["logs"]),
    ("--trace=lo", ["logs"]),
    ("-n 2 tr", ["train.py"]),
    ("--hosts a:4,b:4 --bind tr", ["train.py"]),
    ("--engine openmpi --n", ["--no-status"]),
    # from here on it is not ours
    ("train.py --ho", []),
    ("-n 2 train.py lo", ["log.txt", "logs"]),
    ("-m pkg.train --ho", []),
    ("-mpkg.train --ho", []),
    ("-- --ho", []),
]
Complete = Callable[[str], list[str]]


class Terminal:
    """A shell at a terminal."""

    def __init__(self, start_job: Any, command: list[str], folder: Path) -> None:
        self.fd, slave = pty.openpty()
        env = {"TERM": "dumb", "INPUTRC": "/dev/null", "HOME": str(folder), "ZDOTDIR": str(folder)}
        self.job = start_job(command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env)
        os.close(slave)

    def type(self, keys: str, until: str) -> str:
        """Types, and returns what the terminal shows up to and with the pattern `until`."""
        os.write(self.fd, keys.encode())
        seen, deadline = "", time.monotonic() + 20
        while not re.search(until, seen):
            if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"{until} never came after {keys!r}, only {seen!r}")
            seen += os.read(self.fd, 4096).decode()
        return seen

    def line(self, keys: str) -> str:
        """Types a line without its end, and returns what it has become; Ctrl-T says that, Ctrl-U removes it."""
        found = re.search(r"<<(.*?)>>", self.type(keys + "\x14", r"<<.*?>>"))
        os.write(self.fd, b"\x15")
        assert found is not None
        return found[1]


def candidates(typed: str, became: str) -> list[str]:
    """What a line that became longer has been completed to."""
    start = max(typed.rfind(" "), typed.rfind("=")) + 1
    assert became.startswith(typed[:start])
    # Shells differ in what they put behind a name at once.
    return plain([] if became == typed else became[start:].split())


def plain(words: list[str]) -> list[str]:
    return sorted(word.rstrip("=/") for word in words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("completion")
    (path / "logs").mkdir()
    for name in ("log.txt", "train.py", "job.toml"):
        (path / name).touch()
    for shell in ("bash", "zsh", "fish"):
        (path / f"completion.{shell}").write_text(script(shell))
    return path


def found(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


@pytest.fixture
def bash(start_job: Any, folder: Path) -> Iterator[Complete]:
    terminal = Terminal(start_job, [found("bash"), "--norc", "--noprofile", "-i"], folder)
    # Not the whole marker in what is echoed.
    report = r"""bind -x '"\C-t": printf "<%s>" "<$READLINE_LINE>"'"""
    terminal.type(f"source completion.bash; {report}; echo rea''dy\n", "ready")

    def complete(typed: str) -> list[str]:
        # Escape * inserts all that would be listed.
        return candidates(typed, terminal.line(f"ddp-launch {typed}\x1b*").removeprefix("ddp-launch "))

    yield complete
    os.close(terminal.fd)


@pytest.fixture
def zsh(start_job: Any, folder: Path) -> Iterator[Complete]:
    terminal = Terminal(start_job, [found("zsh"), "-f", "-i"], folder)
    setup = r"""
    unsetopt beep; autoload -Uz compinit; compinit -D -u; source ./completion.zsh
    report() { print -rn -- "<""<$BUFFER>"">" }; zle -N report; bindkey '^T' report; bindkey '^U' kill-whole-line
    zle -C all-matches complete-word _generic; bindkey '^X' all-matches
    zstyle ':completion:all-matches::::' completer _all_matches _complete
    zstyle ':completion:all-matches:*' insert true
    """
    (folder / "setup.zsh").write_text(setup)
    terminal.type("source ./setup.zsh; echo rea''dy\n", "ready")

    def complete(typed: str) -> list[str]:
        return candidates(typed, terminal.line(f"ddp-launch {typed}\x18").removeprefix("ddp-launch "))

    yield complete
    os.close(terminal.fd)


@pytest.fixture
def fish(folder: Path) -> Complete:
    path = found("fish")

    def complete(typed: str) -> list[str]:
        code = "source completion.fish; complete -C $argv[1]"
        command = [path, "--no-config", "-c", code, f"ddp-launch {typed}"]
        env = {**os.environ, "HOME": str(folder)}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=20)
        words = [line.partition("\t")[0] for line in done.stdout.splitlines()]
        return plain([word.removeprefix(typed.rpartition(" ")[2].partition("=")[0] + "=") for word in words])

    return complete


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, request: Any) -> None:
    complete: Complete = request.getfixturevalue(shell)
    assert {typed: complete(typed) for typed, _ in CASES} == dict(CASES)


def test_bash_lists_every_option(request: Any) -> None:
    from launcher.settings.options import OPTIONS

    complete: Complete = request.getfixturevalue("bash")
    assert complete("-") == sorted(option.name for option in OPTIONS)
