"""Hosts that a job with `min_ranks` does without: a lost host that is back, or a new line of the hostfile.

While the job could have more ranks, the launcher probes each of these hosts: it runs `import ddp` there, through the
remote shell. A host that fails is probed again a second later, and one that does not answer a minute later. When a host
has succeeded, the job is resized onto it, as by `ddp-launch --resize`. If the ranks of that resize fail, the job
goes on as it was, and the hosts are probed less often, until a resize succeeds.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from collectives.errors import ROOT
from launcher import network
from launcher.engines.engine import REGISTRY
from launcher.errors import UsageError
from launcher.job import Job
from launcher.linux import die_with_parent
from launcher.network import Host

# Seconds from one probe to the next, while no resize has failed.
_INTERVAL = 1.0
# Maximum number of seconds from one probe to the next, after many resizes have failed or were refused.
_LONGEST = 300.0
# Seconds after which a host that has not answered is probed anew.
_ANSWER_LIMIT = 60.0


class ReturningHosts:
    """Probes whether the hosts that a job could use, but does without, can be reached.

    requested: the job as the user asked for it; environ: of the launcher
    max_ranks: the number of ranks that the user asked for, at first or by a resize; None: as many as hosts have slots
    interval: seconds from one probe to the next
    """

    def __init__(self, requested: Job, environ: Mapping[str, str]) -> None:
        self.max_ranks = requested.n
        self.interval = _INTERVAL
        self._hosts = requested.hosts  # Not the hosts of an allocation, which Slurm manages.
        # Resolved now: later a name server may not answer, and the event loop would wait for it.
        self._here = [host.name for host in self._hosts if network.is_here(host.name)]
        variables = [engine.shell_variable for engine in REGISTRY.values()]
        self._shell = next((environ[name] for name in variables if name in environ), "ssh").split()
        self._hostfile = requested.hostfile
        self._environ = environ
        # By host: the process that probes the host, and the time at which to end the process.
        self._probes: dict[Host, tuple[Any, float]] = {}

    def probe(self, job: Job, rank_limit: float) -> None:
        """Discards the answers so far. If the job can have more ranks, probes each host that it may use but does not.

        A host on which a probe still runs is left alone.

        job: as it is now; rank_limit: the maximum number of its ranks, 0 before its ranks are in their loop
        """
        now = time.monotonic()
        for host, (process, deadline) in [*self._probes.items()]:
            if process.poll() is not None or now > deadline:
                self._end(host)
        hosts = self._wanted()
        if self._ranks_on(hosts, rank_limit) <= job.size:
            return
        import subprocess  # Imported late, because most jobs have all hosts.

        for host in hosts:
            if host in job.hosts or host in self._probes:
                continue
            # `import ddp` also brings the files that ranks import into that host's page cache.
            code = f"import sys; sys.path.insert(0, {ROOT!r}); import ddp"
            with suppress(OSError):  # there is no such program
                command = [*self._shell, host.name, shlex.join([sys.executable, "-c", code])]
                process = subprocess.Popen(
                    ["true"] if host.name in self._here else command,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # without a terminal it cannot ask for a password
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
                self._probes[host] = process, now + _ANSWER_LIMIT

    def has_answer(self) -> bool:
        """True if a probed host could run `import ddp`. `probe` and `close` discard such answers."""
        return any(process.poll() == 0 for process, _ in self._probes.values())

    def answered(self, current_hosts: tuple[Host, ...], rank_limit: float) -> tuple[tuple[Host, ...], int]:
        """The hosts that the job can have now, and its number of ranks there.

        current_hosts: those that it has; rank_limit: the maximum number of its ranks
        """
        reachable = [*current_hosts, *(host for host, (process, _) in self._probes.items() if process.poll() == 0)]
        hosts = tuple(host for host in self._wanted() if host in reachable)
        return hosts, self._ranks_on(hosts, rank_limit)

    def _ranks_on(self, hosts: tuple[Host, ...], rank_limit: float) -> int:
        """The number of ranks that the job would have on these hosts."""
        return int(min(sum(host.slots for host in hosts), rank_limit, self.max_ranks or rank_limit))

    def failed(self) -> None:
        """Called when a resize was refused, or the ranks of its start have failed: hosts are probed less often."""
        self.interval = min(2 * self.interval, _LONGEST)

    def succeeded(self) -> None:
        """Called when the ranks of a resize have begun to train: hosts are probed every second again."""
        self.interval = _INTERVAL

    def close(self) -> None:
        """Ends all probes, and discards the answers so far."""
        for host in [*self._probes]:
            self._end(host)

    def _end(self, host: Host) -> None:
        process, _ = self._probes.pop(host)
        process.kill()
        process.wait()

    def _wanted(self) -> tuple[Host, ...]:
        """The hosts that the job may use: those in its hostfile now.

        If there is no hostfile, or it is not valid at this moment: those that the user asked for when the job began.
        """
        if self._hostfile is not None:
            with suppress(UsageError):  # it is being written
                return network.read_hostfile(self._hostfile)
        return self._hosts
