"""The options of `ddp-launch`. `launcher.config` parses the keys of a job file by the same functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from launcher.arguments import ArgumentParser, positive, value
from launcher.errors import UsageError
from launcher.job import BACKENDS, GRACE, HANG_TIMEOUT, HEARTBEAT_TIMEOUT, START_LIMIT

if TYPE_CHECKING:
    from launcher.network import Host

#: Value of `-n` for one rank on each visible GPU.
GPU = "gpu"

_USAGE = """\
ddp-launch [OPTIONS] SCRIPT [ARGS...]
       ddp-launch [OPTIONS] -m MODULE [ARGS...]
       ddp-launch --config FILE [OPTIONS] [ARGS...]
       ddp-launch --resize N --job PID"""
_WHAT = "Runs a Python program as several ranks (processes), on one host or more, and explains failures."
_MORE = """\
Options come before SCRIPT; all words after SCRIPT are passed to it. `--` ends the options.
SCRIPT is anything that `python SCRIPT` runs: a file, a folder or zip file with a __main__.py, or -,
the standard input. Options on the command line override those of the job file.
Defaults stand in parentheses at the end of a line.

Exit code: 0 if all ranks ended with 0; otherwise that of the first rank that failed: 1 for an
exception, 128 + N if signal N killed it. 2 for wrong use; 75 if the ranks were asked to stop, and
have saved their state; 124 after --timeout; 130 after Ctrl-C.
"""
# Options of other launchers, each with the option of ddp-launch that the error message suggests.
_COUNTS = ("--np", "--nproc", "--nproc_per_node", "--nproc-per-node", "--num_processes", "--num-processes", "--ntasks")
_ELSEWHERE = {**dict.fromkeys(_COUNTS, "-n N"), "--nnodes": "--hosts"}


def _hosts(text: str) -> tuple[Host, ...]:
    from launcher.network import parse_hosts  # Imported late: most jobs name no hosts.

    return parse_hosts(text)


_COUNT = value(f"a whole number of ranks, or {GPU}", lambda text: GPU if text == GPU else int(text))
_WHOLE = value("a whole number", int)
_SECONDS = value("a number of seconds", float)
_LIMIT = value("a number of seconds, or off", lambda text: None if text == "off" else float(text) or None)
# The default host is the loopback address, which other machines cannot reach.
_ADDRESS = value(
    "a port, or HOST:PORT", lambda text: (text.rpartition(":")[0] or "127.0.0.1", int(text.split(":")[-1]))
)
_RANKS = value("ranks, as in 0,3", lambda text: tuple(int(rank) for rank in text.split(",")))


def _engine(text: str) -> str:
    return "mpich" if text == "intel" else text


@lru_cache(maxsize=1)
def parser() -> ArgumentParser:
    """The parser of `ddp-launch`. Options of a job are named after the fields of `Job`."""
    result = ArgumentParser("ddp-launch", usage=_USAGE, description=_WHAT, epilog=_MORE)

    def options(heading: str) -> Callable[..., None]:
        group = result.add_argument_group(heading)

        def add(*names: str, help: str, metavar: str = "", type: Callable[[str], Any] = str, **settings: Any) -> None:
            value: dict[str, Any] = {"metavar": metavar, "type": type} if metavar else {"action": "store_true"}
            group.add_argument(*names, help=help, **(value | settings))

        return add

    add = options("Program")
    add(
        "-n",
        "-np",
        dest="n",
        metavar="N",
        type=_COUNT,
        help="number of ranks; gpu: one per GPU (the hosts' slots, Slurm's tasks, or 1)",
    )
    add("-m", dest="module", metavar="MODULE", help="run a module instead of SCRIPT, as `python -m` does")
    add("--no-python", help="SCRIPT is any program, such as a shell script, and not run by Python")
    add("--config", metavar="FILE", help="job file in TOML. [launch]: script and options; [args]: its arguments")

    add = options("Hosts and devices")
    add("--hosts", metavar="HOSTS", type=_hosts, help="hosts, each with its number of slots for ranks: a:4,b:4")
    add("--hostfile", metavar="FILE", help="the same from a file, one host per line: a:4 or a slots=4")
    add(
        "--engine",
        metavar="NAME",
        type=_engine,
        help="what starts the ranks: local, mpich (or intel), openmpi, slurm (auto)",
    )
    add("--backend", metavar="NAME", help=f"what collectives.init() chooses: {', '.join(BACKENDS[1:])} ({BACKENDS[0]})")
    add("--bind", help="bind each rank to its share of the host's cores")
    add("--share-gpu", help="let several ranks use the same GPU")

    add = options("Time limits and restarts")
    ends = f"seconds between asking the ranks to end and killing them ({GRACE:g})"
    add("--grace", metavar="S", type=_SECONDS, help=ends)
    started = f"seconds within which all ranks must start ({START_LIMIT:g})"
    add("--start-limit", metavar="S", type=_SECONDS, help=started)
    add("--timeout", metavar="S", type=_LIMIT, help="seconds after which the job is ended (off)")
    hang = f"seconds without progress after which the job counts as hung, or off ({HANG_TIMEOUT:g})"
    add("--hang-timeout", metavar="S", type=_LIMIT, help=hang)
    lost = f"seconds without a heartbeat after which a host is lost, or off ({HEARTBEAT_TIMEOUT:g})"
    add("--heartbeat-timeout", metavar="S", type=_LIMIT, help=lost)
    add("--max-restarts", metavar="K", type=_WHOLE, help="restart a job that has failed, at most K times (0)")
    add(
        "--min-ranks",
        metavar="N",
        type=_WHOLE,
        help="restart without lost hosts, with N ranks or more, until they are back",
    )

    add = options("Output")
    add("--ranks", metavar="LIST", type=_RANKS, help="show only the lines of these ranks: 0,3 (all)")
    add("--debug-rank", metavar="K", type=_WHOLE, help="the rank that reads stdin, and stops at breakpoint() (0)")
    add(
        "--metrics-port",
        metavar="PORT",
        type=_ADDRESS,
        help="serve metrics to Prometheus at 127.0.0.1:PORT, or at HOST:PORT",
    )

    add = options("Files")
    add("--log-dir", metavar="DIR", help="write what each rank prints to a file, in a new folder in DIR")
    add("--events", metavar="FILE", help="append what happens to the job, one JSON object per line")
    add("--trace", metavar="DIR", help="record what the ranks do in each step, for ui.perfetto.dev")

    add = options("To resize a running job")
    number = value("a whole number, 1 or more", positive)
    add("--resize", metavar="N", type=number, help="make the job of --job continue with N ranks after a step")
    add(
        "--job",
        metavar="PID",
        type=number,
        help="pid of the ddp-launch on this machine that runs the job; see ddp-top",
    )

    add = options("Information")
    add("--version", help="print the version")
    add("--help", "-h", help="print this help")
    return result


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the options with their values, and the script with its arguments.

    >>> split(["-n", "4", "train.py", "-n", "7"])
    (['-n', '4'], ['train.py', '-n', '7'])

    Raises: UsageError for an unknown option. After --config an unknown option is no error: it begins the arguments of
        the script.
    """
    words = list(argv)
    index = 0
    configured = False
    while words[index:] and words[index].startswith("-") and words[index] not in ("-", "--"):
        short = words[index][:2]
        value = words[index][2:]
        if (short == "-n" and value.isdigit()) or (short == "-m" and value.replace(".", "_").isidentifier()):
            words[index : index + 1] = short, value  # Splits -n4 and -mpkg, which other launchers and Python accept.
        name, equals, _ = words[index].partition("=")
        action = parser().action(name)
        if action is None:
            if configured:
                break
            if name in _ELSEWHERE:
                raise UsageError(f"unknown option {words[index]} (did you mean {_ELSEWHERE[name]}?)")
            raise parser().unknown(words[index:])
        index += 1 if equals or action.nargs == 0 else 2
        if name == "-m":  # As with `python -m`, the rest belongs to the module.
            return words[:index], words[index:]
        configured |= name == "--config"
    return words[:index], words[index + (words[index : index + 1] == ["--"]) :]
