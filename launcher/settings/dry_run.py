"""`--dry-run`: the command that would start the ranks, as a shell would take it, and nothing is started.

What only a real start knows (where the launcher listens, its pid, the job's secret, a free port for rank 0, the folder
of the engine's files) stands as a word in capitals.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from launcher import engines
from launcher.job import Job
from launcher.running.meeting import host_of_rank_0, meeting
from launcher.running.starting import keeper, keepers_environment, ranks_environment
from launcher.wire import LAUNCHER


def show(job: Job, environ: Mapping[str, str]) -> str:
    """The command for a settled job, and what it adds to the environment `environ`.

    Raises: UsageError if there is no engine for it.
    """
    engine = engines.choose(job, environ)
    keepers = keepers_environment(job, engine, "HOST:PORT", "HIDDEN") | {LAUNCHER: "PID"}
    there = meeting(environ, host_of_rank_0(job, engine, environ), "PORT")
    told = {**environ, **ranks_environment(job, 0), **there, **keepers}
    then = engine.environment(told, "SCRATCH")
    return written(engine.command(keeper(job), then), environ, then)


def written(command: Sequence[str], before: Mapping[str, str], then: Mapping[str, str]) -> str:
    """A command in an environment, as a shell takes it.

    >>> print(written(["mpiexec", "-n", "2", "a b"], {"HOME": "/", "X": "1"}, {"HOME": "/", "Y": "2"}), end="")
    env \\
        -u X \\
        Y=2 \\
        mpiexec -n 2 'a b'
    before: the environment as it is; then: as the command finds it
    """
    gone = [f"-u {shlex.quote(name)}" for name in before if name not in then]
    new = [f"{name}={shlex.quote(value)}" for name, value in then.items() if before.get(name) != value]
    return " \\\n    ".join(("env", *gone, *new, shlex.join(command))) + "\n"
