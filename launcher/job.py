"""The description of a job: one frozen dataclass for the command line, job files and Python."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.errors import UsageError, plural

if TYPE_CHECKING:
    from launcher.network import Host

#: Seconds between asking the ranks to end and killing them; at most 2 after the failure of a rank.
GRACE = 5.0
#: Seconds within which every rank must have started.
START_LIMIT = 60.0
#: Seconds without any progress after which a job counts as hanging. A little less than the default time limit of a
#: collective (600 s), so that the job ends with a table of all ranks, and not with the error of one of them.
HANG_TIMEOUT = 540.0
#: Seconds without a heartbeat after which a rank counts as lost. Its agent sends one heartbeat a second.
HEARTBEAT_TIMEOUT = 30.0
#: Given in place of a script: the script is read from the standard input.
STDIN = "-"
#: Values of `collectives.init(backend=...)`.
BACKENDS = ("auto", "single", "mpi", "nccl")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script, a module or a program that one or more ranks run. Exactly one of `script` and `module` is given.

    script: path of whatever `python SCRIPT` takes: a Python file, a compiled file, a folder or zip file with a
    `__main__.py`; `-`: each rank runs the script that the launcher reads from its standard input
    module: name of a module, as for `python -m`
    no_python: `script` is a program of any kind: its path, or its name on PATH
    args: the script's `sys.argv[1:]`
    n: number of ranks; None: the sum of the hosts' slots, or the number of tasks of a Slurm allocation, else 1
    hosts: machines to start ranks on, each with its number of slots; empty: this one, or those of the allocation
    hostfile: the file that names `hosts`; with `min_ranks` it is read again while the job runs; None: there is none
    engine: what starts the ranks: a name of `launcher.engines`, or "auto" for the first engine that can start them
    backend: the backend that `collectives.init()` takes on every rank unless the script names one; one of `BACKENDS`
    bind: each rank is bound to its part of the cores
    share_gpu: several ranks may get the same GPU; always so with the backends "mpi" and "single"
    grace: seconds between asking the ranks to end and killing them; at most 2 after the failure of a rank
    start_limit: seconds within which every rank must have started
    timeout: seconds after which the job is ended; None: never
    hang_timeout: seconds without progress on any rank after which the job counts as hanging; None: never
    heartbeat_timeout: seconds without a heartbeat after which a rank is lost; values below 5 count as 5; None: never
    max_restarts: maximum number of restarts after failures
    min_ranks: a restart leaves out lost hosts if the other hosts have slots for this many ranks. A lost host is used
    again when it is back, unless it belongs to a Slurm allocation. None: a restart uses all hosts
    log_dir: each run makes a folder here, with a log file per rank; None: no log files
    ranks: the ranks whose lines the console shows; None: all
    events: file for the job's events, one JSON object per line; None: no such file
    trace: folder for a trace of all ranks, made if it does not exist; None: no trace
    metrics_port: host and port at which Prometheus finds the job's metrics, as ("127.0.0.1", 9400); None: no metrics
    debug_rank: the rank that gets the standard input, and can be debugged in the terminal
    prefix: if there are several ranks, each line begins with its rank. False: lines begin without it, and output
    appears in whole lines, except one progress bar and prompts that the user can answer

    Raises: UsageError if options are invalid, or do not fit together.
    """

    script: str | None = None
    module: str | None = None
    no_python: bool = False
    args: tuple[str, ...] = ()
    n: int | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: str | None = None
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

    def with_ranks(self, n: int, hosts: tuple[Host, ...]) -> Job:
        """The same job with `n` ranks on these hosts.

        `ranks` loses the ranks from `n` on, and becomes None if none is left. A `debug_rank` from `n` on becomes 0.

        Raises: UsageError if such a job is invalid.
        """
        shown_ranks = None if self.ranks is None else tuple(rank for rank in self.ranks if rank < n) or None
        debug_rank = self.debug_rank if self.debug_rank < n else 0
        return replace(self, n=n, hosts=hosts, ranks=shown_ranks, debug_rank=debug_rank)

    @property
    def target(self) -> tuple[str, ...]:
        """The arguments of an agent: see `launcher.agent.rank.run`."""
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
        # If neither hosts nor n is given, an allocation may set the number of ranks; then this is checked again.
        size = self.size if self.n is not None or self.hosts else float("inf")
        ranks = "an unknown number of ranks" if size == float("inf") else plural(size, "rank")
        if self.min_ranks is not None and not 1 <= self.min_ranks <= size:
            limits = "at least 1" if size == float("inf") else f"from 1 to {size}"
            raise UsageError(f"the smallest number of ranks (min_ranks) must be {limits}, not {self.min_ranks}")
        if self.ranks is not None:
            if not self.ranks:
                raise UsageError("the ranks to show are none at all: name one or more")
            if wrong := [rank for rank in self.ranks if not 0 <= rank < size]:
                raise UsageError(f"rank {wrong[0]} cannot be shown: the job has {ranks}, counted from 0")
        if not 0 <= self.debug_rank < size:
            raise UsageError(f"rank {self.debug_rank} cannot be debugged: the job has {ranks}, counted from 0")


def _foreign(path: str) -> str:
    """What kind of file `path` is, if not Python: an ELF program, or a script for another interpreter. Else ""."""
    with open(path, "rb") as file:
        line = file.readline(200)
        if line.startswith(b"\x7fELF"):
            return "a compiled program"
        if line.startswith(b"#!") and b"python" not in line:
            try:
                # A script for another interpreter may be valid Python, too.
                compile(line + file.read(), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                return f"a script for {line[2:].strip().decode(errors='replace')}"
    return ""
