"""Uses ddp-launch to start ranks that call every collective, and evaluates their results."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from launcher.doctor import gpu, mpi
from launcher.doctor.findings import Finding, count, error, note, ok, warning
from launcher.doctor.machine import versions
from launcher.doctor.probes import Answer, outside_a_job, run_probe
from launcher.engines import slurm
from launcher.errors import plural
from launcher.linux import format_bytes
from launcher.network import Host

# Time limit of a trial (s). On an idle machine a trial takes a few seconds.
_LIMIT = 90.0
# No rank can start after an error of one of these checks.
_REQUIRED_CHECKS = {"python", "threads", "mpi", "limits"}
# How many of the last lines of a failed trial are shown.
_SHOWN_LINES = 12


class Trial(NamedTuple):
    """A set of ranks that try the collectives.

    n: the number of ranks; through: "mpi": on this machine; "nccl": on its GPUs; "slurm": in the allocation, started by
    Slurm; "hosts": one rank on each of `hosts`
    """

    n: int
    through: str = "mpi"
    hosts: tuple[Host, ...] = ()

    def __str__(self) -> str:
        means = {"mpi": "over MPI and shared memory", "nccl": "over NCCL", "slurm": "that Slurm starts"}
        on_hosts = f"on {', '.join(host.name for host in self.hosts)} over MPI"
        return f"{plural(self.n, 'rank')} {means.get(self.through, on_hosts)}"


def trials(broken: Set[str], *, mpiexec: bool, tasks: int, gpus: int, hosts: tuple[Host, ...]) -> list[Trial]:
    """The trials to make.

    broken: checks that found errors; mpiexec: whether there is one
    tasks: how many ranks srun may start in this allocation, 0 if srun does not start the ranks here
    gpus: how many GPUs NCCL can use; hosts: those that are to train together
    """
    if broken & _REQUIRED_CHECKS:
        return []
    chosen = [Trial(2)] if mpiexec else []
    if tasks > 1:
        chosen.append(Trial(2, "slurm"))
    if gpus and "gpu" not in broken and (mpiexec or gpus == 1):
        chosen.append(Trial(min(2, gpus), "nccl"))
    if hosts:
        chosen.append(Trial(len(hosts), "hosts", hosts))
    return chosen


def check(findings: Sequence[Finding], hosts: tuple[Host, ...]) -> Iterator[Finding]:
    """Makes the trials that the findings of earlier checks allow, and evaluates them."""
    broken = {finding.check for finding in findings if finding.level == "error"}
    starters = mpi.starters()
    tasks = (slurm.tasks(os.environ) or 0) if starters.srun else 0
    tries = trials(broken, mpiexec=bool(starters.family), tasks=tasks, gpus=gpu.probe().nccl_ranks, hosts=hosts)
    if not tries:
        yield note("none were started" + (": fix the errors above first" if broken else ""))
    for trial in tries:
        # If the doctor runs in a rank or a Slurm step, the ranks of a trial must not get the variables of that job.
        environ = None if trial.through in ("slurm", "hosts") else outside_a_job()
        answer = run_probe(*command(trial), module="launcher", limit=_LIMIT + 10, environ=environ)
        yield from evaluate(answer, trial)
        if answer.value is None and count(findings, "warning"):
            yield note("one of the warnings above may be why")


def command(trial: Trial) -> list[str]:
    """The arguments of `python -m launcher` for a trial."""
    on_hosts = ["--hosts", ",".join(f"{host.name}:1" for host in trial.hosts)] if trial.hosts else []
    backend = "nccl" if trial.through == "nccl" else "mpi"
    return ["-n", str(trial.n), *on_hosts, "-m", "launcher.doctor.trial", backend, str(_LIMIT)]


def evaluate(answer: Answer, trial: Trial) -> Iterator[Finding]:
    """The findings that follow from the ranks' results, or from their output if there are none."""
    again = f"\nto see it again: {' '.join(['ddp-launch', *command(trial)])}"
    if answer.value is None:
        # The launcher explains the failure in its last line; the lines above it are the ranks'.
        last = [line for line in answer.lines if line.startswith("ddp-launch: ")][-1:]
        reason = last[0].partition(": ")[2] if last else answer.reason
        lines = "".join(f"\n{line}" for line in answer.lines[-_SHOWN_LINES:] if line not in last)
        # Not an error: without NCCL, arrays of a GPU go through the host's memory.
        level = warning if trial.through == "nccl" else error
        yield level(f"{trial} could not try the collectives: {reason}{lines}{again}")
        return
    results = answer.value
    for name, dtype, elements in results["wrong"]:
        yield error(f"{name} of {dtype} gave {elements} wrong elements between {trial}{again}")
    if not results["wrong"]:
        yield ok(f"{trial}: {results['tried']} collectives give the right numbers in {results['dtypes']} dtypes")
    if answer.status:
        yield warning(f"{trial} then ended with exit status {answer.status}: {''.join(answer.lines[-1:])}")
    for text in results["refused"]:
        yield warning(text)
    local = versions()
    for host, remote in results["versions"].items():
        if differing := [name for name in local if remote.get(name) != local[name]]:
            text = ", ".join(f"{name} {remote.get(name) or '(none)'} (here: {local[name]})" for name in differing)
            copy = shlex.join(["rsync", "-a", f"{sys.prefix}/", f"{host}:{sys.prefix}/"])
            yield warning(f"{host} has {text}: ranks may compute different numbers", copy)
    ranks = plural(trial.n, "rank") + (f" on {results['nodes']} hosts" if results["nodes"] > 1 else "")
    for nbytes, seconds in results["timed"]:
        # For a few bytes the time is the latency, and a rate would mean nothing.
        rate = f"{nbytes / seconds / 1e9:6.1f} GB/s" if nbytes >= 1 << 10 else ""
        line = f"all_reduce ({ranks})  {format_bytes(nbytes):>7}  {seconds * 1e6:8.1f} us  {rate}"
        yield ok(line.rstrip(), check="speed")
