"""What a process has around it: a worker finds what the training process has when the worker starts.

The server that workers are forked of is started once, and a program changes these things later as well.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from collectives.backends.detached import passed_on
from collectives.start import joined
from collectives.world import promised

# What would make a worker take part in the job as a rank, or begin MPI as soon as a script that it imports names it.
_OF_A_RANK = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_FD", "PMI_PORT", "SLURM_STEP_NUM_TASKS")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Surroundings(NamedTuple):
    """argv and path: of `sys`; folder: the working one; environ: what of it is for processes that are no ranks."""

    argv: list[str]
    path: list[str]
    folder: str
    environ: dict[str, str]

    @classmethod
    def current(cls) -> Surroundings:
        """Those that workers of this process should have."""
        return cls(list(sys.argv), [each for each in sys.path if isinstance(each, str)], _folder(), environment())

    def take(self, before: dict[str, str]) -> None:
        """Makes them this process's. before: the environ that was taken last: what modules add here stays."""
        sys.argv[:], sys.path[:] = self.argv, self.path
        try:
            os.chdir(self.folder)
        except OSError:
            pass  # it is gone for the training process, too
        for name in before.keys() - self.environ.keys():
            os.environ.pop(name, None)
        for name, value in self.environ.items():
            if before.get(name) != value:
                os.environ[name] = value


def environment() -> dict[str, str]:
    """The environment of this process as its workers should have it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PMIX_")}
    for name in _OF_A_RANK:
        environ.pop(name, None)
    environ.update(dict.fromkeys(_ONE_THREAD, "1"), MPI4PY_RC_INITIALIZE="0")
    environ.update(passed_on(joined(), promised()))
    return environ


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
