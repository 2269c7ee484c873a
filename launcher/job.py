"""What to start: one frozen value, whether it came from the command line, a TOML file or Python."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.network import Host

#: Seconds between asking the ranks to end and killing them.
GRACE = 5.0
#: Seconds within which every rank must have started.
START_LIMIT = 60.0
#: Seconds without any progress after which a job counts as hanging: a little less than a collective waits by itself, so
#: that the job ends with a table of all ranks, and not with what one of them saw.
HANG_TIMEOUT = 540.0
#: Seconds without a heartbeat of a rank, which comes every second, after which its host or the way to it is down.
HEARTBEAT_TIMEOUT = 30.0
#: The script that is read from the standard input.
STDIN = "-"
#: What `collectives.init(backend=...)` takes.
BACKENDS = ("auto", "single", "mpi", "nccl")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script, a module or a program, to be run by several ranks.

    script: path of what `python SCRIPT` takes: a Python file, a folder or zip file with a `__main__.py`, a compiled
    file; `-`: each rank runs what the launcher reads from its standard input; or
    module: name of a module, as in `python -m`; exactly one of the two
    no_python: `script` is a program of any kind, by its path or found on PATH
    args: what the script finds in `sys.argv[1:]`
    n: number of ranks; None: as many as the hosts have slots, or as an allocation of Slurm has tasks, else 1
    hosts: machines to start ranks on, each with the number of ranks that it takes; none: this one, or those of Slurm
    engine: who starts the ranks, "auto": the one that is there, or a name of `launcher.engines`
    backend: what `collectives.init()` chooses on every rank, one of `BACKENDS`
    bind: each rank is bound to its share of the cores
    share_gpu: several ranks may be given the same GPU
    grace: seconds between asking the ranks to end and killing them
    start_limit: seconds within which every rank must have started
    timeout: seconds after which the job is ended; None: never
    hang_timeout: seconds without progress on any rank after which the job counts as hanging; None: never
    heartbeat_timeout: seconds without a heartbeat of a rank after which it is lost; None: never
    max_restarts: how often a job that failed starts again
    min_ranks: a restart goes on with the hosts that are left while they take this many ranks; None: it needs all. The
    hosts are those above, or those of Slurm
    log_dir: folder for a folder of log files, one a rank; None: none
    ranks: whose lines the console shows; None: everybody's
    events: file for what happens, one JSON object a line; None: none
    trace: folder for a trace of what all ranks did, made if it is not there; None: none
    metrics_port: host and port at which figures are served for Prometheus, ("127.0.0.1", 9400); None: nowhere
    debug_rank: the rank that has the standard input, and the terminal in a debugger
    prefix: lines bear their rank in front, if there is more than one; False if only rank 0 speaks, in lines and a bar

    Raises: UsageError if no such job can exist.
    """

    script: str | None = None
    module: str | None = None
    no_python: bool = False
    args: tuple[str, ...] = ()
    n: int | None = None
    hosts: tuple[Host, ...] = ()
    engine: str = "auto"
    backend: str = "auto"
    bind: bool = False
    share_gpu: bool = False
    grace: float = GRACE
    start_limit: float = START_LIMIT
    timeout: float | None = None
    hang_timeout: float | None = HANG_TIMEOUT
    heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT
    max_restarts: int = 0
    min_ranks: int | None = None
    log_dir: str | None = None
    ranks: tuple[int, ...] | None = None
    events: str | None = None
    trace: str | None = None
    metrics_port: tuple[str, int] | None = None
    debug_rank: int = 0
    prefix: bool = True

    def __post_init__(self) -> None:
        self._check_target()
        self._check_numbers()
        self._check_ranks()
        if self.backend not in BACKENDS:
            raise UsageError(f"the backend should be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        for what, path in (("trace folder", self.trace), ("log folder", self.log_dir), ("events file", self.events)):
            if path == "":
                raise UsageError(f"the {what} needs a name")

    @property
    def size(self) -> int:
        """The number of ranks: `n`, or the sum of the hosts' slots, or 1."""
        return self.n if self.n is not None else sum(host.slots for host in self.hosts) or 1

    @property
    def target(self) -> tuple[str, ...]:
        """What an agent is given: see `launcher.agent.rank.run`."""
        if self.script is not None:
            return (*["--no-python"] * self.no_python, self.script, *self.args)
        assert self.module is not None
        return ("-m", self.module, *self.args)

    def _check_target(self) -> None:
        if self.script is not None and self.module is not None:
            raise UsageError(f"give a script or a module, not both: {self.script} and -m {self.module}")
        if not self.module and self.script is None:
            raise UsageError("no script to run: ddp-launch [-n N] SCRIPT ARGS... (ddp-launch --help shows more)")
        if self.script is None:
            if self.no_python:
                raise UsageError(f"a module is Python: give -m {self.module} or --no-python, not both")
            return
        if self.no_python or self.script == STDIN:
            return
        if not os.path.exists(self.script):
            if os.path.basename(self.script).startswith("python"):
                raise UsageError(
                    f"leave {self.script} out: ddp-launch starts scripts, and modules (-m), in its own Python"
                )
            raise UsageError(f"there is no script {self.script} (for a program that is not Python: --no-python)")
        if not os.access(self.script, os.R_OK):
            raise UsageError(f"the script {self.script} cannot be read")
        if os.path.isdir(self.script):
            if not os.path.exists(os.path.join(self.script, "__main__.py")):
                raise UsageError(f"{self.script} is a directory without a __main__.py, which Python would run")
        elif os.path.isfile(self.script) and (foreign := _foreign(self.script)):
            raise UsageError(f"{self.script} is {foreign}, and no Python: ddp-launch --no-python {self.script}")

    def _check_numbers(self) -> None:
        if self.n is not None and self.n < 1:
            raise UsageError(f"the number of ranks must be at least 1, not {self.n}")
        if not 0 <= self.grace < float("inf"):
            raise UsageError(f"the grace must be a number of seconds, zero or more, not {self.grace:g}")
        limits = {
            "start limit": self.start_limit,
            "time limit": self.timeout,
            "hang time limit": self.hang_timeout,
            "heartbeat time limit": self.heartbeat_timeout,
        }
        for name, value in limits.items():
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the {name} must be a number of seconds above zero, not {value:g}")
        if self.max_restarts < 0:
            raise UsageError(f"the number of restarts must be zero or more, not {self.max_restarts}")

    def _check_ranks(self) -> None:
        # Without hosts and a number, an allocation may still have the last word: checked again once it is known.
        size = self.size if self.n is not None or self.hosts else float("inf")
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        if self.min_ranks is not None and not 1 <= self.min_ranks <= size:
            limits = "at least 1" if size == float("inf") else f"from 1 to {size}"
            raise UsageError(f"the smallest number of ranks must be {limits}, not {self.min_ranks}")
        if self.ranks is not None:
            if not self.ranks:
                raise UsageError("the ranks to show are none at all: name one or more")
            if wrong := [rank for rank in self.ranks if not 0 <= rank < size]:
                raise UsageError(f"rank {wrong[0]} cannot be shown: the job has {ranks}, counted from 0")
        if not 0 <= self.debug_rank < size:
            raise UsageError(f"rank {self.debug_rank} cannot be debugged: the job has {ranks}, counted from 0")


def _foreign(path: str) -> str:
    """What a file is, if its first line says that it is nothing for Python; else ""."""
    with open(path, "rb") as file:
        line = file.readline(200)
        if line.startswith(b"\x7fELF"):
            return "a compiled program"
        if line.startswith(b"#!") and b"python" not in line:
            try:
                compile(line + file.read(), path, "exec", dont_inherit=True)  # some start a Python from a shell's line
            except (SyntaxError, ValueError):
                return f"a script for {line[2:].strip().decode(errors='replace')}"
    return ""
