"""Which ranks are started for a trial: what is known to be broken would only be said a second time, and less well."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from launcher.hosts import Host

_NEEDED = {"python", "threads", "mpi", "limits"}


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
