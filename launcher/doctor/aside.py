"""A question put to a process of its own: what it loads may crash it, hang it, or print whatever it likes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: In front of what is said by a process that was asked, in a line of its own among others.
MARK = "ddp-doctor-answer "


_ENDING = 3.0  # s; a launcher that is asked to end takes its ranks with it

_running: set[subprocess.Popen[bytes]] = set()


class Answer(NamedTuple):
    """What a process said before it ended.

    said: None if nothing; trouble: why, "" if it said something; lines: all else that it printed
    status: its exit status, minus the signal that killed it, None if it had not ended in time
    """

    said: Any
    trouble: str
    lines: tuple[str, ...] = ()
    status: int | None = 0

    @property
    def missing(self) -> bool:
        """True if a package that it needs is not installed."""
        return self.trouble.startswith("ModuleNotFoundError: ")


def ask(module: str, *args: str, limit: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Runs `python -m MODULE ARGS...` for at most `limit` seconds; it and its children are gone when this returns.

    environ: its environment, to which is added where this process finds its modules
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**(os.environ if environ is None else environ), "PYTHONPATH": paths}
    try:
        status, lines = run([sys.executable, "-m", module, *args], limit, environ)
    except OSError as failure:
        return Answer(None, f"no process could be started: {failure.strerror}", (), None)
    return understand(lines, status, limit)


def run(command: Sequence[str], limit: float, environ: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """The exit status of a command, None if it had not ended after `limit` seconds, and the lines that it printed.

    Raises: OSError if it cannot be started.
    """
    with tempfile.TemporaryFile() as output:  # no pipe: what it leaves behind could keep one open
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        _running.add(child)
        status: int | None = None
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            pass  # no status: the caller says so
        finally:
            _end(child)
            _running.discard(child)
        output.seek(0)
        return status, output.read().decode(errors="replace").splitlines()


def end_all() -> None:
    """Ends what other threads have started, which then return."""
    for child in list(_running):
        child.terminate()


def answer(look: Callable[[], object]) -> None:
    """What a process that was asked does: it looks, and says what it has seen."""
    seen = look()
    print(f"\n{MARK}{json.dumps(seen)}", flush=True)


def understand(lines: Sequence[str], status: int | None, limit: float) -> Answer:
    """The answer in what was printed by a process that ended with that exit status (None: it had not ended in time)."""
    printed = tuple(line for line in lines if line.strip() and MARK not in line)
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):  # cut off in the middle: as if there were none
                return Answer(json.loads(text), "", printed, status)
    if status is None:
        trouble = f"the process that tried had not ended after {limit:g} s"
    elif status < 0:
        trouble = f"the process that tried died of {_name(-status)}"
    else:
        trouble = printed[-1].strip() if printed else f"the process that tried said nothing, exit status {status}"
    return Answer(None, trouble, printed, status)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
            child.wait(_ENDING)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and its children with it
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
