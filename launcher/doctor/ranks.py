"""The proof: ranks that ddp-launch starts, that call every collective, and whose results are compared."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from typing import NamedTuple

from launcher.doctor.findings import Finding, error, ok, warning
from launcher.doctor.probes import Answer, ask, outside_a_job
from launcher.network import Host

CHECK = "ranks"
_LIMIT = 90.0  # s; a few seconds on an idle machine
_NEEDED = {"python", "threads", "mpi", "limits"}  # checks without which no rank starts
_SHOWN = 12  # lines of what went wrong


class Trial(NamedTuple):
    """`n` ranks.

    through: "mpi", on this machine; "nccl", on its GPUs; "slurm", which starts them where the allocation is; "hosts"
    hosts: one rank on each
    """

    n: int
    through: str = "mpi"
    hosts: tuple[Host, ...] = ()


def trials(broken: Set[str], *, mpiexec: bool, tasks: int, gpus: int, hosts: tuple[Host, ...]) -> list[Trial]:
    """What is to be tried.

    broken: checks that found errors; mpiexec: there is one
    tasks: that srun may start in this allocation, 0 outside of one
    gpus: that could be spoken to through NCCL; hosts: that are to train together
    """
    if broken & _NEEDED:
        return []
    found = [Trial(2)] if mpiexec else []
    if tasks > 1:
        found.append(Trial(2, "slurm"))
    if gpus and "gpu" not in broken and (mpiexec or gpus == 1):
        found.append(Trial(min(2, gpus), "nccl"))
    if len(hosts) > 1 and "hosts" not in broken:
        found.append(Trial(len(hosts), "hosts", hosts))
    return found


def command(trial: Trial) -> list[str]:
    """What follows `python -m launcher`."""
    where = ["--hosts", ",".join(f"{_bracketed(host.name)}:1" for host in trial.hosts)] if trial.hosts else []
    backend = "nccl" if trial.through == "nccl" else "mpi"
    return ["-n", str(trial.n), *where, "-m", "launcher.doctor.trial", backend, str(_LIMIT)]


def check(trial: Trial) -> list[Finding]:
    """Starts them and judges."""
    # What a launcher says to this process is not for them, nor what Slurm does, unless it is to start them.
    environ = os.environ if trial.through in ("slurm", "hosts") else outside_a_job(os.environ)
    return judge(ask("launcher", *command(trial), limit=_LIMIT + 10, environ=environ), trial)


def judge(answer: Answer, trial: Trial) -> list[Finding]:
    """What follows from the ranks' results, or from what was printed instead."""
    n = trial.n
    who = (
        f"{n} rank{'s' * (n != 1)} "
        + {
            "mpi": "over MPI and shared memory",
            "nccl": "over NCCL",
            "slurm": "that Slurm starts",
            "hosts": f"on {', '.join(host.name for host in trial.hosts)} over MPI",
        }[trial.through]
    )
    again = " ".join(["ddp-launch", *command(trial)])
    if answer.value is None:
        said = [line for line in answer.lines if line.startswith("ddp-launch: ")]
        # The launcher explains the failure in its last line; what came before it is the story.
        reason = said[-1].partition(": ")[2] if said else answer.reason
        story = "".join(f"\n{line}" for line in answer.lines[-_SHOWN:] if line not in said[-1:])
        level = (
            warning if trial.through == "nccl" else error
        )  # without NCCL, arrays of a GPU go through the host's memory
        return [level(CHECK, f"{who} could not try the collectives: {reason}{story}\nto see it again: {again}")]
    seen = answer.value
    found = []
    if seen["wrong"]:
        for name, dtype, elements in seen["wrong"]:
            text = f"{name} of {dtype} gave {elements} wrong elements between {who}\nto see it again: {again}"
            found.append(error(CHECK, text))
    else:
        text = f"{who}: {seen['tried']} collectives give the right numbers in {seen['dtypes']} dtypes"
        found.append(ok(CHECK, text))
    if answer.status:
        found.append(warning(CHECK, f"{who} then ended with exit status {answer.status}: {''.join(answer.lines[-1:])}"))
    found += [warning(CHECK, text) for text in seen["refused"]]
    found += [ok("speed", line) for line in table(seen["timed"], n, seen["nodes"])]
    return found


def table(timed: Sequence[tuple[int, float]], n: int, nodes: int) -> list[str]:
    """A line for each size: bytes, microseconds, and GB/s (1e9 bytes) of the array reduced."""
    rows = [(_size(nbytes), f"{seconds * 1e6:.1f} us", _rate(nbytes, seconds)) for nbytes, seconds in timed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    who = f"{n} rank{'s' * (n != 1)}" + (f" on {nodes} hosts" if nodes > 1 else "")
    lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"all_reduce ({who})  {line}" for line in lines]


def _size(nbytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _rate(nbytes: int, seconds: float) -> str:
    """Of a few bytes there is only a latency."""
    return f"{nbytes / seconds / 1e9:.1f} GB/s" if nbytes >= 1 << 10 else ""


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name
