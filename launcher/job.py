"""What to start: one frozen value, whether it came from the command line, a TOML file or Python."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: Seconds between asking the ranks to end and killing them.
GRACE = 5.0


class UsageError(Exception):
    """The job as asked for cannot be started; the message is one sentence for the user. `ddp-launch` exits with 2."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script or a module, to be run by `n` ranks on this machine.

    script: path of a Python file, or
    module: name of a module, as in `python -m`; exactly one of the two
    args: what the script finds in `sys.argv[1:]`
    n: number of ranks
    grace: seconds between asking the ranks to end and killing them
    start_limit: seconds within which every rank must have started
    trace: folder for a trace of what all ranks did, made if it is not there; None: none
    prefix: lines bear their rank in front, if there is more than one; False if only rank 0 speaks, in lines and a bar

    Raises: UsageError if no such job can exist.
    """

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    n: int = 1
    grace: float = GRACE
    start_limit: float = 60.0
    trace: str | None = None
    prefix: bool = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"the number of ranks must be at least 1, not {self.n}")
        if not 0 <= self.grace < float("inf"):
            raise UsageError(f"the grace must be a number of seconds, zero or more, not {self.grace}")
        if self.script is not None and self.module is not None:
            raise UsageError(f"give a script or a module, not both: {self.script} and -m {self.module}")
        if self.trace == "":
            raise UsageError("the trace needs a folder")
        if self.module == "" or (self.script is None and self.module is None):
            raise UsageError("no script to run: ddp-launch [-n N] SCRIPT ARGS... (ddp-launch --help shows more)")
        if self.script is not None:
            if os.path.isdir(self.script):
                raise UsageError(f"{self.script} is a directory, not a Python script")
            if not os.path.exists(self.script):
                raise UsageError(f"there is no script {self.script}")
            if not os.access(self.script, os.R_OK):
                raise UsageError(f"the script {self.script} cannot be read")

    @property
    def target(self) -> tuple[str, ...]:
        """What a keeper is given: `SCRIPT ARGS...` or `-m MODULE ARGS...`."""
        if self.script is not None:
            return (self.script, *self.args)
        assert self.module is not None
        return ("-m", self.module, *self.args)
