"""Asks a question in a process of its own: what it loads may crash it, hang it, or print anything."""

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

#: Begins the line with the answer among all that a process prints.
MARK = "ddp-doctor-answer "


_ENDING = 3.0  # s; a launcher that is asked to end takes its ranks with it

_ENGINES = (
    *("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "ORTE_", "SLURM_", "HYDRA_", "HYDI_", "MPI_LOCAL"),
    *("PALS_", "FLUX_", "MPIEXEC_", "MV2_COMM_", "LSB_", "PBS_"),
)
# Settings of the library, not of a job.
_KEPT = tuple(f"OMPI_MCA_{name}" for name in ("pml", "btl", "mtl", "accelerator", "opal_cuda", "smcuda"))

_running: set[subprocess.Popen[bytes]] = set()


class Answer(NamedTuple):
    """What a process answered before it ended.

    value: None if nothing; reason: why, "" if there is a value; lines: all else that it printed
    status: its exit status, minus the signal that killed it, None if it had not ended in time
    """

    value: Any
    reason: str
    lines: tuple[str, ...] = ()
    status: int | None = 0

    @property
    def missing(self) -> bool:
        """True if a package that it needs is not installed."""
        return self.reason.startswith("ModuleNotFoundError: ")


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


def outside_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what launchers and engines told this process: in it an MPI is a world of one."""
    return {name: value for name, value in environ.items() if name.startswith(_KEPT) or not name.startswith(_ENGINES)}


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
    """In the process that was asked: prints what `look` returns, as JSON."""
    print(f"\n{MARK}{json.dumps(look())}", flush=True)


def understand(lines: Sequence[str], status: int | None, limit: float) -> Answer:
    """The answer in what was printed by a process that ended with that exit status (None: it had not ended in time)."""
    printed = tuple(line for line in lines if line.strip() and MARK not in line)
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):  # cut off in the middle: as if there were none
                return Answer(json.loads(text), "", printed, status)
    if status is None:
        reason = f"the process that tried had not ended after {limit:g} s"
    elif status < 0:
        reason = f"the process that tried died of {_name(-status)}"
    else:
        reason = printed[-1].strip() if printed else f"the process that tried said nothing, exit status {status}"
    return Answer(None, reason, printed, status)


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
