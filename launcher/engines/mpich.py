"""Engine: hydra, the mpiexec of MPICH and Intel MPI. It forwards the environment.

hydra uses ssh to reach the hosts that the user has named. In an allocation it finds out by itself how to reach the
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from launcher.engines.engine import Engine, MpiexecEngine, StartRequest, register
from launcher.engines.mpiexec import INTEL, OPENMPI, without_torchrun
from launcher.network import fill_hosts

# For a job on this machine: hydra uses neither ssh nor srun, and ignores an allocation.
_LOCAL = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
# For a job on hosts that were named: hydra uses ssh, or the user's HYDRA_LAUNCHER_EXEC, and ignores an allocation.
_NAMED = {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"}
# Keeps a hydra proxy from writing the machine's topology into /tmp for its ranks: a proxy that is killed would leave
# the file there. Each rank finds the topology itself, which takes milliseconds.
_NO_FILE = {"HWLOC_XMLFILE": ""}


@register("mpich")
@dataclass(frozen=True)
class MpichEngine(MpiexecEngine):
    """Starts ranks by hydra. intel: whether it is Intel's hydra; local_address: how remote hosts reach this one"""

    shell_variable: ClassVar[str] = "HYDRA_LAUNCHER_EXEC"

    intel: bool = False
    local_address: str | None = None

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        program, family = request.mpiexec
        if family == OPENMPI:
            return None
        return cls(
            program,
            request.job.size,
            request.hosts,
            request.remote_hosts,
            intel=family == INTEL,
            local_address=request.local_address,
        )

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`. hydra forwards its own environment.

        >>> MpichEngine("mpiexec", 2).command(["python", "train.py"], {})
        ['mpiexec', '-disable-auto-cleanup', '-n', '2', 'python', 'train.py']
        """
        words = [self.mpiexec]
        if not self.intel:
            # The launcher, not hydra, decides what happens to the other ranks after one has died.
            words.append("-disable-auto-cleanup")
            if self.hosts:
                # The address, because other hosts may be unable to resolve this host's name.
                words += [] if self.local_address is None else ["-localhost", self.local_address]
                words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in self.hosts)]
        if self.intel and self.hosts:
            # Intel's hydra takes one program per host, with ":" between them.
            for name, number in fill_hosts(self.n, self.hosts):
                words += [":"] * (len(words) > 1) + ["-n", str(number), "-host", name, *rank]
            return words
        return [*words, "-n", str(self.n), *rank]

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`. Does not overwrite variables that the user has set."""
        settings = dict(_NO_FILE)
        if self.hosts:
            settings |= _NAMED
        elif not self.remote_hosts:
            settings |= _LOCAL
        return settings | without_torchrun(environ)
