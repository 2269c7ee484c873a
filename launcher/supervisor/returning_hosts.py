"""Hosts that a job with `min_ranks` does without: one that was lost and is back, or a new line of the hostfile.

Every second each of them is asked, by the engine's remote shell, to run this Python. When some have done so, the
job is resized onto them, as `ddp-launch --resize` does it. If the ranks there fail, the job goes on as it was, and the
hosts are asked less often, until a resize succeeds.
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

from launcher import network
from launcher.engines.engine import REGISTRY
from launcher.errors import UsageError
from launcher.job import Job
from launcher.linux import die_with_parent
from launcher.network import Host

# Seconds from one question to the next, at first and at most.
_INTERVAL = 1.0
_LONGEST = 300.0
# Seconds after which a host that has not answered is asked anew.
_ANSWER_LIMIT = 60.0


class ReturningHosts:
    """Asks the hosts that a job could have.

    requested: the job as the user asked for it; environ: of the engine
    max_ranks: the largest number of ranks; None: as many as hosts have slots
    interval: seconds from one question to the next
    """

    def __init__(self, requested: Job, environ: Mapping[str, str]) -> None:
        self.max_ranks = requested.n
        self.interval = _INTERVAL
        self._hosts = requested.hosts  # not those of an allocation, which are Slurm's
        # Found now: a name server may not answer later, when the job would have to wait for it.
        self._here = [host for host in self._hosts if network.is_here(host.name)]
        variables = [engine.shell_variable for engine in REGISTRY.values()]
        self._shell = next((environ[name] for name in variables if name in environ), "ssh").split()
        self._hostfile = requested.hostfile
        self._environ = environ
        # By host: the process that asks it, and the time at which to end it.
        self._questions: dict[Host, tuple[Any, float]] = {}

    def ask(self, hosts: tuple[Host, ...]) -> None:
        """Asks each host that the job does without, unless it has still to answer. hosts: those that it has"""
        now = time.monotonic()
        for host, (question, deadline) in [*self._questions.items()]:
            if host in hosts or question.poll() is not None or now > deadline:
                self._end(host)
        for host in self._wanted():
            if host in hosts or host in self._questions:
                continue
            import subprocess  # here, because most jobs have all hosts

            command = [*self._shell, host.name, f"{shlex.quote(sys.executable)} -c pass"]
            with suppress(OSError):  # there is no such program
                question = subprocess.Popen(
                    ["true"] if host in self._here else command,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # it cannot ask for a password
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
                self._questions[host] = question, now + _ANSWER_LIMIT

    def answered(self, job: Job, limit: float) -> tuple[tuple[Host, ...], int] | None:
        """Hosts for the job, with those that have answered, and its number of ranks there; None if it is no larger.

        job: as it is now; limit: the most ranks that it can have
        """
        reachable = [*job.hosts, *(host for host, (question, _) in self._questions.items() if question.poll() == 0)]
        hosts = tuple(host for host in self._wanted() if host in reachable)
        n = int(min(sum(host.slots for host in hosts), limit, self.max_ranks or limit))
        return (hosts, n) if n > job.size else None

    def failed(self) -> None:
        """The ranks on the hosts that had answered have failed: hosts are asked less often."""
        self.interval = min(2 * self.interval, _LONGEST)

    def succeeded(self) -> None:
        """The ranks on the hosts that had answered train."""
        self.interval = _INTERVAL

    def close(self) -> None:
        """Ends the questions that have no answer yet."""
        for host in [*self._questions]:
            self._end(host)

    def _end(self, host: Host) -> None:
        question, _ = self._questions.pop(host)
        question.kill()
        question.wait()

    def _wanted(self) -> tuple[Host, ...]:
        """The hosts that the job may have: those of its hostfile as it is now, else those of its start."""
        if self._hostfile is not None:
            with suppress(UsageError):  # it is being written
                return network.read_hostfile(self._hostfile)
        return self._hosts
