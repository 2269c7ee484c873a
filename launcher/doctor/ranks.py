"""The proof: ranks that ddp-launch starts, that call every collective, and whose results are compared."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from launcher.doctor import gpu, mpi
from launcher.doctor.findings import Finding, count, error, note, ok, plural, warning
from launcher.doctor.machine import versions
from launcher.doctor.probes import Answer, ask, outside_a_job
from launcher.engines import slurm
from launcher.linux import format_bytes
from launcher.network import Host

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

    def __str__(self) -> str:
        where = {"mpi": "over MPI and shared memory", "nccl": "over NCCL", "slurm": "that Slurm starts"}
        on_hosts = f"on {', '.join(host.name for host in self.hosts)} over MPI"
        return f"{plural(self.n, 'rank')} {where.get(self.through, on_hosts)}"


def trials(broken: Set[str], *, mpiexec: bool, tasks: int, gpus: int, hosts: tuple[Host, ...]) -> list[Trial]:
    """What is to be tried.

    broken: checks that found errors; mpiexec: there is one
    tasks: that srun may start in this allocation, 0 outside of one
    gpus: that NCCL can use; hosts: that are to train together
    """
    if broken & _NEEDED:
        return []
    found = [Trial(2)] if mpiexec else []
    if tasks > 1:
        found.append(Trial(2, "slurm"))
    if gpus and "gpu" not in broken and (mpiexec or gpus == 1):
        found.append(Trial(min(2, gpus), "nccl"))
    if hosts:
        found.append(Trial(len(hosts), "hosts", hosts))
    return found


def check(found: Sequence[Finding], hosts: tuple[Host, ...]) -> Iterator[Finding]:
    """Tries what is left to be tried after these findings."""
    broken = {each.check for each in found if each.level == "error"}
    starters = mpi.starters()
    tasks = (slurm.tasks(os.environ) or 0) if starters.srun else 0
    tries = trials(broken, mpiexec=bool(starters.family), tasks=tasks, gpus=gpu.look().nccl_ranks, hosts=hosts)
    if not tries:
        yield note("none were started" + (": fix the errors above first" if broken else ""))
    for trial in tries:
        # A rank's or a Slurm step's variables are not for these ranks, unless Slurm or an engine is to start them.
        environ = None if trial.through in ("slurm", "hosts") else outside_a_job()
        answer = ask(*command(trial), module="launcher", limit=_LIMIT + 10, environ=environ)
        yield from judge(answer, trial)
        if answer.value is None and count(found, "warning"):
            yield note("one of the warnings above may be why")


def command(trial: Trial) -> list[str]:
    """What follows `python -m launcher`."""
    where = ["--hosts", ",".join(f"{host.name}:1" for host in trial.hosts)] if trial.hosts else []
    backend = "nccl" if trial.through == "nccl" else "mpi"
    return ["-n", str(trial.n), *where, "-m", "launcher.doctor.trial", backend, str(_LIMIT)]


def judge(answer: Answer, trial: Trial) -> Iterator[Finding]:
    """What follows from the ranks' results, or from what was printed instead."""
    again = f"\nto see it again: {' '.join(['ddp-launch', *command(trial)])}"
    if answer.value is None:
        # The launcher explains the failure in its last line; the lines before it are the ranks'.
        last = [line for line in answer.lines if line.startswith("ddp-launch: ")][-1:]
        reason = last[0].partition(": ")[2] if last else answer.reason
        lines = "".join(f"\n{line}" for line in answer.lines[-_SHOWN:] if line not in last)
        # Without NCCL, arrays of a GPU go through the host's memory.
        level = warning if trial.through == "nccl" else error
        yield level(f"{trial} could not try the collectives: {reason}{lines}{again}")
        return
    seen = answer.value
    for name, dtype, elements in seen["wrong"]:
        yield error(f"{name} of {dtype} gave {elements} wrong elements between {trial}{again}")
    if not seen["wrong"]:
        yield ok(f"{trial}: {seen['tried']} collectives give the right numbers in {seen['dtypes']} dtypes")
    if answer.status:
        yield warning(f"{trial} then ended with exit status {answer.status}: {''.join(answer.lines[-1:])}")
    for text in seen["refused"]:
        yield warning(text)
    here = versions()
    for host, there in seen["versions"].items():
        if differing := [name for name in here if there.get(name) != here[name]]:
            text = ", ".join(f"{name} {there.get(name) or '(none)'} (here: {here[name]})" for name in differing)
            copy = shlex.join(["rsync", "-a", f"{sys.prefix}/", f"{host}:{sys.prefix}/"])
            yield warning(f"{host} has {text}: ranks may compute different numbers", copy)
    who = plural(trial.n, "rank") + (f" on {seen['nodes']} hosts" if seen["nodes"] > 1 else "")
    for nbytes, seconds in seen["timed"]:
        # A few bytes have only a latency.
        rate = f"{nbytes / seconds / 1e9:6.1f} GB/s" if nbytes >= 1 << 10 else ""
        line = f"all_reduce ({who})  {format_bytes(nbytes):>7}  {seconds * 1e6:8.1f} us  {rate}"
        yield ok(line.rstrip(), check="speed")
