"""`--dry-run`: the command that would start the ranks, as a shell would take it, and nothing is started.

What only a real start knows (where the launcher listens, the job's secret, the folder of the engine's files) stands as
a word in capitals.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from launcher import engine
from launcher.attempt import _command
from launcher.job import Job
from launcher.wire import ADDRESS, SECRET


def show(job: Job, environ: Mapping[str, str]) -> str:
    """The command for that job, and what it adds to the environment `environ`.

    Raises: UsageError if there is no engine for it.
    """
    family, command = _command(job, environ)
    threads = max(1, len(os.sched_getaffinity(0)) // job.size)
    then = {"OMP_NUM_THREADS": str(threads), **engine.engine_environment(family, environ, "SCRATCH")}
    return written(command, environ, {**then, ADDRESS: "HOST:PORT", SECRET: "HIDDEN"})


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
