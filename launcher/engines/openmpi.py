"""Open MPI's mpiexec: many defaults that are wrong for training are set right; to other hosts it goes by ssh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.engines.engine import Engine, MpiexecEngine, StartRequest, register
from launcher.engines.mpiexec import OPENMPI, without_torchrun

# What it needs to start as fast as MPICH on one machine; by default it probes every network first. Its module for TCP
# would listen on all of them.
_FAST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "self,sm"}
# It keeps its files in /tmp/ompi.PID; what a killed one leaves there makes a later one with that pid fail.
_SCRATCH = "PRTE_MCA_prte_tmpdir_base"
# What describes a host or a terminal, and not the job.
_STAYS = ("HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "SSH_", "XDG_", "DBUS_")
_ITS_OWN = ("OMPI_", "PRTE_", "PMIX_", "OPAL_", "PMI_")


@register("openmpi")
@dataclass(frozen=True)
class OpenMpiEngine(MpiexecEngine):
    """Options and settings of Open MPI's `mpiexec`."""

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """As `Engine.select`."""
        program, family = request.mpiexec
        return cls(program, request.job.size, request.hosts, request.remote_hosts) if family == OPENMPI else None

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`.

        >>> OpenMpiEngine("mpiexec", 2).command(["python", "train.py"], {})[-4:]
        ['-n', '2', 'python', 'train.py']
        """
        # Binding to one core, its default for two ranks, makes BLAS and our helper threads share it.
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        if self.hosts:
            hosts = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--host", hosts]
        if self.remote_hosts:
            # By name alone: values, our secret among them, would be seen by everybody who lists processes.
            options += [word for name in environ if not name.startswith(_STAYS + _ITS_OWN) for word in ("-x", name)]
        return [self.mpiexec, *options, "-n", str(self.n), *rank]

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`; what the user chose stays."""
        # Without HOME it does not start at all.
        ours = {"HOME": os.path.expanduser("~")}
        if self.remote_hosts and _FAST.items() <= environ.items():
            # A rank of a job on one host has started this one, and these are that job's.
            environ = {name: value for name, value in environ.items() if name not in _FAST}
        if not self.remote_hosts:
            # On other hosts that folder would not be removed; and their networks may be faster than TCP.
            ours |= {_SCRATCH: scratch, **_FAST}
        return {**ours, **without_torchrun(environ)}
