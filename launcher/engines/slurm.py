"""Slurm: inside an allocation srun knows the nodes, and starts ranks on them without ssh.

srun and the MPI must speak a common language (PMI-2, PMIx), or each rank would believe that it is alone.
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

# Which of `srun --mpi=list` a family speaks, the first that is there. Intel's needs a library of Slurm's and its path.
_LANGUAGES = {MPICH: ("pmi2", "cray_shasta"), OPENMPI: ("pmix",)}
_LIMIT = 20.0  # s


@register("slurm")
@dataclass(frozen=True)
class SlurmEngine(Engine):
    """`srun` of path `srun`, for `n` ranks.

    language: what the MPI speaks, as `--mpi` takes it
    hosts: where to start them; none: as the allocation says
    remote_hosts: nodes besides this one
    """

    srun: str
    language: str
    n: int
    hosts: tuple[Host, ...] = ()
    remote_hosts: tuple[str, ...] = ()
    cpus: str | None = None
    name: str = "srun"

    priority: ClassVar[int] = 10
    fills_in_order: ClassVar[bool] = False

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """As `Engine.select`; without being asked for, only inside an allocation whose srun speaks with the MPI."""
        asked = request.job.engine == "slurm"
        if not asked and not request.allocated:
            return None
        srun, family = find(request.environ), mpiexec.family_of_this_python(request.environ)
        spoken = language(family, srun) if srun is not None else None
        if srun is None or spoken is None:
            if asked:
                text = "there is no srun on PATH, or it does not speak PMI-2 (MPICH) or PMIx (Open MPI) with this MPI"
                raise UsageError(f"--engine slurm: {text} (see srun --mpi=list)")
            return None
        job, cpus = request.job, request.environ.get("SLURM_CPUS_PER_TASK")
        return cls(srun, spoken, job.size, job.hosts, request.remote_hosts, cpus)

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`: the environment goes along by itself."""
        # Who died first, and what the others get to do about it, the launcher decides. A step of a restart, or
        # one beside an interactive shell, must not wait for what another step has. Cores and GPUs are dealt by agents.
        options = [f"--mpi={self.language}", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL"]
        options += ["--cpu-bind=none", "--gpu-bind=none"]
        if self.cpus:
            options.append(f"--cpus-per-task={self.cpus}")  # srun does not take it from the allocation by itself
        if self.hosts:
            names = [name for name, number in fill_hosts(self.n, self.hosts) for _ in range(number)]
            options += ["--distribution=arbitrary", f"--nodelist={','.join(names)}"]
        return [self.srun, *options, "-n", str(self.n), *rank]

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`."""
        return without_outer_mpi(environ)


def inside(environ: Mapping[str, str]) -> bool:
    """True in an allocation: under salloc, in a batch script, in a step."""
    return "SLURM_JOB_ID" in environ


def tasks(environ: Mapping[str, str]) -> int | None:
    """How many tasks the allocation was made for; None outside one.

    >>> tasks({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"})
    8
    """
    if not inside(environ):
        return None
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or 1
    return _number(environ, "SLURM_NTASKS") or nodes * (_number(environ, "SLURM_NTASKS_PER_NODE") or 1)


def remote_hosts(environ: Mapping[str, str], here: str | None = None) -> tuple[str, ...]:
    """The allocation's nodes besides this one. here: this machine's name"""
    name = environ.get("SLURMD_NODENAME") or (socket.gethostname() if here is None else here).partition(".")[0]
    return tuple(node for node in nodes(environ) if node != name)


def hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The allocation's nodes, each with its tasks, `tasks` in all; none outside of one.

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
    if (len(slots), sum(slots)) != (len(names), n):  # of a step, or of cores: then alike, as far as that goes
        slots = [n // len(names) + (number < n % len(names)) for number in range(len(names))]
    return tuple(Host(name, number) for name, number in zip(names, slots, strict=True) if number)


def nodes(environ: Mapping[str, str]) -> list[str]:
    """The names of the allocation's nodes; none outside of one. Slurm itself says what its short form stands for.

    Raises: UsageError if it does not.
    """
    text = environ.get("SLURM_JOB_NODELIST", "")
    if "[" not in text:
        return [name for name in text.split(",") if name]
    scontrol = find(environ, "scontrol")
    if scontrol is None:
        raise UsageError(f"there is no scontrol on PATH to say which nodes {text} are: name them by --hosts")
    names, complaint = _run(scontrol, "show", "hostnames", text)
    if not names:  # of a list that it cannot read it complains, and ends with 0
        reason = (complaint.splitlines() or ["it says nothing"])[-1]
        raise UsageError(f"{scontrol} does not say which nodes {text} are ({reason}): name them by --hosts")
    return names.split()


def find(environ: Mapping[str, str], name: str = "srun") -> str | None:
    """The path of srun, or of another program of Slurm's; None if there is none on PATH."""
    import shutil  # here, because most jobs have no Slurm

    return shutil.which(name, path=environ.get("PATH", os.defpath))


def language(family: str | None, srun: str) -> str | None:
    """What both `srun` and an MPI of this family speak; None: nothing."""
    wanted = _LANGUAGES.get(family or "", ())
    # `srun --mpi=list` names one a line, and after "specific" all versions in one.
    text = "".join(_run(srun, "--mpi=list")) if wanted else ""
    offered = [line.strip().removeprefix("srun: ") for line in text.splitlines()]
    return next((each for each in wanted if each in offered), None)


def _run(*command: str) -> tuple[str, str]:
    """What a program of Slurm's prints to stdout and stderr."""
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT, text=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, done.stderr


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
