"""Engine: Slurm's srun, which starts ranks on the nodes of an allocation, without ssh.

srun and the MPI must speak the same protocol (PMI-2 or PMIx), or each rank would form a world of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from launcher.engines import mpiexec
from launcher.engines.engine import Engine, StartRequest, register
from launcher.engines.mpiexec import MPICH, OPENMPI, without_outer_mpi
from launcher.errors import UsageError
from launcher.network import Host, fill_hosts
from launcher.placement import tasks_per_node

# By MPI family: the process-management interfaces (PMI) that it speaks, as `srun --mpi=list` calls them, best first.
# Intel MPI has none: it would need the path of a library of Slurm.
_PMI = {MPICH: ("pmi2", "cray_shasta"), OPENMPI: ("pmix",)}
# Time limit of a Slurm command (s).
_LIMIT = 20.0


@register("slurm")
@dataclass(frozen=True)
class SlurmEngine(Engine):
    """Starts `n` ranks by srun.

    srun: its path
    pmi: the process-management interface that the MPI speaks, as `srun --mpi` takes it
    hosts: where to start ranks; empty: on the nodes of the allocation
    remote_hosts: nodes other than this one
    cpus: cores per rank, if the allocation sets a number
    """

    srun: str
    pmi: str
    n: int
    hosts: tuple[Host, ...] = ()
    remote_hosts: tuple[str, ...] = ()
    cpus: str | None = None
    name: str = "srun"

    priority: ClassVar[int] = 10
    fills_in_order: ClassVar[bool] = False

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """As `Engine.select`. Unless asked for by name, it starts a job only in an allocation.

        In both cases srun and the MPI must speak the same protocol.
        """
        requested = request.job.engine == "slurm"
        if not requested and not request.allocated:
            return None
        srun = find(request.environ)
        if srun is not None:
            pmi = common_pmi(mpiexec.family_of_this_python(request.environ), srun)
            if pmi is not None:
                cpus = request.environ.get("SLURM_CPUS_PER_TASK")
                job = request.job
                return cls(srun, pmi, job.size, job.hosts, request.remote_hosts, cpus)
        if requested:
            raise UsageError(
                "--engine slurm: there is no srun on PATH, or it does not speak PMI-2 (MPICH) or PMIx (Open MPI) with "
                "this MPI (see srun --mpi=list)"
            )
        return None

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`. srun forwards its own environment."""
        options = [
            f"--mpi={self.pmi}",
            # The launcher, not srun, decides what happens to the other ranks after one has ended.
            "--kill-on-bad-exit=0",
            "--wait=0",
            # A restart must not wait for the resources of an earlier step, or of an interactive shell.
            "--overlap",
            "--export=ALL",
            # Agents assign cores and GPUs.
            "--cpu-bind=none",
            "--gpu-bind=none",
        ]
        if self.cpus:
            options.append(f"--cpus-per-task={self.cpus}")  # srun itself ignores the allocation's number.
        if self.hosts:
            names = [name for name, number in fill_hosts(self.n, self.hosts) for _ in range(number)]
            options += ["--distribution=arbitrary", f"--nodelist={','.join(names)}"]
        return [self.srun, *options, "-n", str(self.n), *rank]

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        return without_outer_mpi(environ)


def inside(environ: Mapping[str, str]) -> bool:
    """True in an allocation: under salloc, in a batch script, or in a step."""
    return "SLURM_JOB_ID" in environ


def tasks(environ: Mapping[str, str]) -> int | None:
    """The number of tasks of the allocation; None outside an allocation.

    >>> tasks({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"})
    8
    """
    if not inside(environ):
        return None
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or 1
    return _number(environ, "SLURM_NTASKS") or nodes * (_number(environ, "SLURM_NTASKS_PER_NODE") or 1)


def remote_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The allocation's nodes other than this one. Raises: UsageError as `nodes`."""
    name = environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    return tuple(node for node in nodes(environ) if node != name)


def hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The allocation's nodes that have tasks, with the number of tasks as slots; () outside an allocation.

    Raises: UsageError as `nodes`.

    >>> hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "3,2"})
    (Host(name='n1', slots=3), Host(name='n2', slots=2))
    """
    n = tasks(environ)
    if n is None or not (names := nodes(environ)):
        return ()
    try:
        slots = tasks_per_node(environ["SLURM_TASKS_PER_NODE"])
    except (KeyError, ValueError):
        slots = []
    # The variable may be missing, describe a step, or count cores. Then the tasks are divided evenly.
    if (len(slots), sum(slots)) != (len(names), n):
        slots = [n // len(names) + (number < n % len(names)) for number in range(len(names))]
    return tuple(Host(name, number) for name, number in zip(names, slots, strict=True) if number)


def nodes(environ: Mapping[str, str]) -> list[str]:
    """The names of the allocation's nodes; [] outside an allocation. scontrol expands a list like n[1-4].

    Raises: UsageError if scontrol is missing, or fails.
    """
    text = environ.get("SLURM_JOB_NODELIST", "")
    if "[" not in text:
        return [name for name in text.split(",") if name]
    scontrol = find(environ, "scontrol")
    if scontrol is None:
        raise UsageError(f"there is no scontrol on PATH to say which nodes {text} are: name them by --hosts")
    names, errors = _run(scontrol, "show", "hostnames", text)
    if not names:  # scontrol ends with 0 even for a list that it does not understand.
        reason = (errors.splitlines() or ["it says nothing"])[-1]
        raise UsageError(f"{scontrol} does not say which nodes {text} are ({reason}): name them by --hosts")
    return names.split()


def find(environ: Mapping[str, str], name: str = "srun") -> str | None:
    """The path of srun, or of another Slurm command; None if it is not on PATH."""
    import shutil  # Imported late, because most jobs do not use Slurm.

    return shutil.which(name, path=environ.get("PATH", os.defpath))


def common_pmi(family: str | None, srun: str) -> str | None:
    """The process-management interface that both `srun` and an MPI of this family speak; None if there is none."""
    supported = _PMI.get(family or "", ())
    # `srun --mpi=list` prints one interface per line, and all their versions in a line after "specific".
    text = "".join(_run(srun, "--mpi=list")) if supported else ""
    offered = [line.strip().removeprefix("srun: ") for line in text.splitlines()]
    return next((name for name in supported if name in offered), None)


def _run(*command: str) -> tuple[str, str]:
    """Runs a Slurm command. Returns: its stdout and stderr; if it cannot be run, "" and the reason"""
    import subprocess

    try:
        completed = subprocess.run(command, capture_output=True, timeout=_LIMIT, text=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return completed.stdout, completed.stderr


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
