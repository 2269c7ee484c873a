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


class Answer(NamedTuple):
    """What a process said before it ended; trouble: why it said nothing, "" if it did; lines: all that it printed."""

    said: Any
    trouble: str
    lines: tuple[str, ...]


def ask(module: str, *args: str, limit: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Runs `python -m MODULE ARGS...` for at most `limit` seconds; it and its children are gone when this returns.

    environ: its environment, to which is added where this process finds its modules
    """
    with tempfile.TemporaryFile() as output:  # no pipe: what it leaves behind could keep one open
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", module, *args]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**(os.environ if environ is None else environ), "PYTHONPATH": paths},
                start_new_session=True,
            )
        except OSError as failure:
            return Answer(None, f"could not be started: {failure.strerror}", ())
        status: int | None = None
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(child)
        output.seek(0)
        return understand(output.read().decode(errors="replace").splitlines(), status, limit)


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
            with contextlib.suppress(ValueError):
                return Answer(json.loads(text), "", printed)
    if status is None:
        trouble = f"had not ended after {limit:g} s"
    elif status < 0:
        trouble = f"died of {_name(-status)}"
    else:
        trouble = printed[-1].strip() if printed else f"said nothing and ended with exit status {status}"
    return Answer(None, trouble, printed)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()  # a launcher takes its ranks with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(3.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
