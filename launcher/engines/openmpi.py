"""Engine: Open MPI's mpiexec. Many of its defaults do not suit training and are changed.

Outside an allocation it reaches other hosts by ssh. In an allocation it finds out by itself how to reach the nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from launcher.engines.engine import Engine, MpiexecEngine, StartRequest, register
from launcher.engines.mpiexec import OPENMPI, without_torchrun

# With these, Open MPI starts as fast as MPICH on one machine. By default it tries every network first, and its TCP
# module listens on all of them.
_FAST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "self,sm"}
# Variable for the folder of Open MPI's files. The default is /tmp/ompi.PID; if an Open MPI that was killed has left
# files there, a later one with that pid fails.
_SCRATCH = "PRTE_MCA_prte_tmpdir_base"
# Variables that describe a host or a terminal, and prefixes of such variables. They are not forwarded to other hosts.
_OF_THE_HOST = ("HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY")
_PREFIXES_OF_THE_HOST = ("SSH_", "XDG_", "DBUS_")
# Prefixes of variables of Open MPI and of an outer MPI's PMI, which are not passed with -x. Open MPI forwards its own
# settings itself. The outer MPI's variables describe one process.
_OF_OPEN_MPI = ("OMPI_", "PRTE_", "PMIX_", "OPAL_", "PMI_")


@register("openmpi")
@dataclass(frozen=True)
class OpenMpiEngine(MpiexecEngine):
    """Starts ranks by Open MPI's mpiexec."""

    shell_variable: ClassVar[str] = "PRTE_MCA_plm_ssh_agent"

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        program, family = request.mpiexec
        return cls(program, request.job.size, request.hosts, request.remote_hosts) if family == OPENMPI else None

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`.

        >>> OpenMpiEngine("mpiexec", 2).command(["python", "train.py"], {})[-4:]
        ['-n', '2', 'python', 'train.py']
        """
        mapping = ["--map-by", "slot:OVERSUBSCRIBE"] if self.hosts else ["--oversubscribe"]
        # By default Open MPI binds each of two ranks to one core, which BLAS and helper threads would share.
        options = ["--allow-run-as-root", *mapping, "--bind-to", "none"]
        if self.hosts:
            options += ["--host", ",".join(f"{host.name}:{host.slots}" for host in self.hosts)]
        if self.remote_hosts:
            # Only the names: values, like the job's secret, would be visible to everyone who lists processes.
            for name in environ:
                if name not in _OF_THE_HOST and not name.startswith(_PREFIXES_OF_THE_HOST + _OF_OPEN_MPI):
                    options += ["-x", name]
        return [self.mpiexec, *options, "-n", str(self.n), *rank]

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`. Does not overwrite variables that the user has set."""
        # Open MPI needs HOME to start. The launcher decides what happens to the other ranks after one has ended.
        settings = {"HOME": os.path.expanduser("~"), "PRTE_MCA_state_base_continuous": "1"}
        if self.remote_hosts and _FAST.items() <= environ.items():
            # A rank of another job has started this launcher. That job runs on one host, and has made these settings.
            environ = {name: value for name, value in environ.items() if name not in _FAST}
        if not self.remote_hosts:
            # Not for several hosts: nothing would remove the folder on the others, and _FAST allows no network.
            settings |= {_SCRATCH: scratch, **_FAST}
        return settings | without_torchrun(environ)
