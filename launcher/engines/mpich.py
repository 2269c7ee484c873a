"""Engine: MPICH's and Intel's mpiexec (hydra). Starts quickly, forwards the environment, uses ssh to other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.engines.engine import Engine, MpiexecEngine, StartRequest, register
from launcher.engines.mpiexec import INTEL, OPENMPI, without_torchrun
from launcher.network import fill_hosts

# The job is on this machine, also inside an allocation: no ssh, no srun.
_LOCAL = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
# The hosts were named: those of an allocation are not asked for. HYDRA_LAUNCHER_EXEC, if set, replaces ssh.
_NAMED = {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"}
# A proxy writes the machine's topology into /tmp for its ranks, and who kills it leaves that file. With this, each rank
# looks for itself, which takes milliseconds.
_NO_FILE = {"HWLOC_XMLFILE": ""}


@register("mpich")
@dataclass(frozen=True)
class MpichEngine(MpiexecEngine):
    """intel: it is Intel's; here: the address by which remote hosts reach this one"""

    intel: bool = False
    here: str | None = None

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """As `Engine.select`."""
        program, family = request.mpiexec
        if family == OPENMPI:
            return None
        return cls(
            program,
            request.job.size,
            request.hosts,
            request.remote_hosts,
            intel=family == INTEL,
            here=request.local_address,
        )

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`: the environment goes along by itself.

        >>> MpichEngine("mpiexec", 2).command(["python", "train.py"], {})
        ['mpiexec', '-disable-auto-cleanup', '-n', '2', 'python', 'train.py']
        """
        # Who died first, and what the others get to do about it, the launcher decides.
        options = [] if self.intel else ["-disable-auto-cleanup"]
        if not self.hosts:
            return [self.mpiexec, *options, "-n", str(self.n), *rank]
        if not self.intel:
            # Other hosts may know this one by another name than its own, or by none.
            options += [] if self.here is None else ["-localhost", self.here]
            hosts = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            return [self.mpiexec, *options, "-hosts", hosts, "-n", str(self.n), *rank]
        programs = [["-n", str(number), "-host", name, *rank] for name, number in fill_hosts(self.n, self.hosts)]
        return [self.mpiexec, *options, *programs[0], *(word for one in programs[1:] for word in (":", *one))]

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`; what the user chose stays."""
        ours = _NAMED if self.hosts else {} if self.remote_hosts else _LOCAL
        return {**ours, **_NO_FILE, **without_torchrun(environ)}
