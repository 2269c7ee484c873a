"""The one table of options: from it come the command line, the keys of job files, and both helps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from launcher.settings import values
from launcher.settings.values import FILE, FLAG, FOLDER, LIMIT, SECONDS, WHOLE, Kind


class Option(NamedTuple):
    """One option.

    name: as it is given
    metavar: what its value is called; "": it takes none
    key: of a job file's [launch], and field of a `Job`; "": it is no part of a job
    kind: of its value
    help: one line
    common: the short help has it too
    value: what an option without a metavar stands for
    """

    name: str
    metavar: str
    key: str
    kind: Kind
    help: str
    common: bool = False
    value: bool = True


GROUPS = {
    "What runs": (
        Option("-n", "N", "n", values.COUNT, "number of ranks (1, or the hosts' slots); gpu: one for each GPU", True),
        Option("-m", "MODULE", "module", values.MODULE, "run a module, as `python -m` does", True),
        Option("--config", "FILE", "", FILE, "a job in TOML: [launch] has options and script, [args] the rest", True),
        Option("--set", "KEY=VALUE", "", values.SETTING, "one key of the job: n=4, args.lr=0.1", True),
    ),
    "Where": (
        Option("--hosts", "HOSTS", "hosts", values.HOSTS, "machines, and how many ranks each takes: a:4,b:4", True),
        Option("--hostfile", "FILE", "hostfile", FILE, "the same from a file, a machine a line: a:4 or a slots=4"),
        Option("--engine", "NAME", "engine", values.ENGINE, "who starts the ranks: mpich (Intel), openmpi or slurm"),
        Option("--backend", "NAME", "backend", values.BACKEND, "what moves the data: single, mpi or nccl"),
        Option("--bind", "", "bind", FLAG, "bind each rank to its share of the cores"),
        Option("--share-gpu", "", "share_gpu", FLAG, "let several ranks have one GPU"),
    ),
    "How it ends": (
        Option("--grace", "S", "grace", SECONDS, "seconds between asking the ranks to end and killing them", True),
        Option("--start-limit", "S", "start_limit", SECONDS, "seconds in which all ranks must have started"),
        Option("--timeout", "S", "timeout", LIMIT, "seconds after which the job is ended", True),
        Option("--hang-timeout", "S", "hang_timeout", LIMIT, "seconds without progress that are a hang, or off", True),
        Option("--heartbeat-timeout", "S", "heartbeat_timeout", LIMIT, "seconds without a word from a host, or off"),
        Option("--max-restarts", "K", "max_restarts", WHOLE, "start a job that failed again, K times at most", True),
        Option("--min-ranks", "N", "min_ranks", WHOLE, "restart without hosts that are lost, down to N ranks"),
    ),
    "What you see": (
        Option("--ranks", "LIST", "ranks", values.RANKS, "show only the lines of these ranks: 0,3"),
        Option("--status", "", "status", FLAG, "a line at the bottom says how the job goes; else on a terminal only"),
        Option("--no-status", "", "status", FLAG, "none, on a terminal either", value=False),
        Option("--debug-rank", "K", "debug_rank", WHOLE, "the rank that has stdin and answers breakpoint()", True),
    ),
    "What is kept": (
        Option("--log-dir", "DIR", "log_dir", FOLDER, "what the ranks print, in a file each", True),
        Option("--events", "FILE", "events", FILE, "what happens to the job, a JSON object a line"),
        Option("--trace", "DIR", "trace", FOLDER, "what the ranks did in each step, for ui.perfetto.dev", True),
    ),
    "To look, and run nothing": (
        Option("--dry-run", "", "", FLAG, "print the command that would start the ranks", True),
        Option("--print-config", "", "", FLAG, "print the job as a job file"),
        Option("--version", "", "", FLAG, "print the version"),
        Option("--help", "", "", FLAG, "print the common options"),
        Option("--help-all", "", "", FLAG, "print all options", True),
    ),
}  # fmt: skip

OPTIONS = tuple(option for group in GROUPS.values() for option in group)
BY_NAME = {option.name: option for option in OPTIONS}
BY_NAME["-h"] = BY_NAME["--help"]
BY_NAME["-np"] = BY_NAME["-n"]  # as mpiexec takes it
#: What other launchers call options of ours that go by names quite unlike theirs.
ELSEWHERE = {"--np": "-n N", "--nproc_per_node": "-n N", "--nproc-per-node": "-n N", "--nnodes": "--hosts"}

#: The keys of [launch] in a job file, and the kinds of their values: those of the options, the script and its words.
KEYS = {"script": FILE, "args": values.WORDS, **{option.key: option.kind for option in OPTIONS if option.key}}


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing if `name` is like none of the known ones."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
