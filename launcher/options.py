"""The one table of options: from it come the command line, the keys of job files, and both help texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from launcher.network import Host


#: The number of ranks that stands for one on each visible GPU.
GPU = "gpu"
#: The time limit that never comes.
OFF = "off"


def _same(value: Any) -> Any:
    return value


class ValueType(NamedTuple):
    """One kind of value.

    what: what a value should be, to the user
    read: the value that a word stands for. Raises: ValueError if it stands for none
    accept: the value that what TOML holds stands for. Raises: ValueError
    show: the value as TOML holds it, None if nothing is to be written
    path: a relative one in a job file counts from the folder of the file
    """

    what: str
    read: Callable[[str], Any]
    accept: Callable[[Any], Any]
    show: Callable[[Any], Any] = _same
    path: bool = False


def _only(*types: type) -> Callable[[Any], Any]:
    """Accepts values of these types, and no boolean for a number."""

    def accept(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(value)
        return value

    return accept


_whole, _flag = _only(int), _only(bool)


def _text(value: Any) -> str:
    text: str = _only(str)(value)
    if "\0" in text:  # which ends a path, a name and an argument for the system
        raise ValueError(value)
    return text


def _number(value: Any) -> float:
    number: float = _only(int, float)(value)
    try:
        float(number)
    except OverflowError:  # an integer, which TOML does not limit
        raise ValueError(value) from None
    return number


def _read_count(word: str) -> int | str:
    return GPU if word == GPU else int(word)


def _accept_count(value: Any) -> int | str:
    return GPU if value == GPU else _whole(value)


def _read_limit(word: str) -> float | None:
    return None if word == OFF else float(word) or None


def _accept_limit(value: Any) -> float | None:
    return None if value == OFF else _number(value) or None


def _show_limit(value: float | None) -> float | str:
    return OFF if value is None else value


def _read_ranks(word: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in word.split(","))


def _accept_ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return _read_ranks(value)
    return tuple(_whole(rank) for rank in (value if isinstance(value, list) else [value]))


def _read_hosts(word: str) -> tuple[Host, ...]:
    from launcher.network import parse_hosts  # here, because most jobs name none

    return parse_hosts(word)


def _accept_hosts(value: Any) -> tuple[Host, ...]:
    return _read_hosts(",".join(_accept_words(value)) if isinstance(value, list) else _text(value))


def _show_hosts(hosts: tuple[Host, ...]) -> list[str] | None:
    return [f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}" for name, slots in hosts] or None


def _accept_words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(value)
    return tuple(_text(word) for word in value)


def _show_list(values: tuple[Any, ...] | None) -> list[Any] | None:
    return list(values) if values else None


def _engine(value: Any) -> str:
    return "mpich" if _text(value) == "intel" else _text(value)


def _refuse(word: str) -> Any:
    raise ValueError(word)


COUNT = ValueType(f"a whole number of ranks, or {GPU}", _read_count, _accept_count)
WHOLE = ValueType("a whole number", int, _whole)
SECONDS = ValueType("a number of seconds", float, _number)
LIMIT = ValueType(f"a number of seconds, or {OFF}", _read_limit, _accept_limit, _show_limit)
HOSTS = ValueType("hosts, as in a:4,b:4", _read_hosts, _accept_hosts, _show_hosts)
RANKS = ValueType("ranks, as in 0,3", _read_ranks, _accept_ranks, _show_list)
FLAG = ValueType("true or false", _refuse, _flag)
MODULE = ValueType("a module's name", str, _text)
ENGINE = ValueType("an engine's name", _engine, _engine)
BACKEND = ValueType("a backend's name", str, _text)
SETTING = ValueType("KEY=VALUE", str, _text)
FILE = ValueType("a path", str, _text, path=True)
FOLDER = ValueType("a folder", str, _text, path=True)
WORDS = ValueType("a list of strings", _refuse, _accept_words, _show_list)


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
    kind: ValueType
    help: str
    common: bool = False
    value: bool = True

    @property
    def usage(self) -> str:
        """How it is given: `--grace S`."""
        return f"{self.name} {self.metavar}".rstrip()


GROUPS = {
    "What runs": (
        Option("-n", "N", "n", COUNT, "number of ranks (1, or the hosts' slots); gpu: one for each GPU", True),
        Option("-m", "MODULE", "module", MODULE, "run a module, as `python -m` does", True),
        Option("--config", "FILE", "", FILE, "a job in TOML: [launch] has options and script, [args] the rest", True),
        Option("--set", "KEY=VALUE", "", SETTING, "one key of the job: n=4, args.lr=0.1", True),
    ),
    "Where": (
        Option("--hosts", "HOSTS", "hosts", HOSTS, "machines, and how many ranks each takes: a:4,b:4", True),
        Option("--hostfile", "FILE", "hostfile", FILE, "the same from a file, a machine a line: a:4 or a slots=4"),
        Option("--engine", "NAME", "engine", ENGINE, "who starts the ranks: local, mpich (Intel), openmpi or slurm"),
        Option("--backend", "NAME", "backend", BACKEND, "what moves the data: single, mpi or nccl"),
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
        Option("--ranks", "LIST", "ranks", RANKS, "show only the lines of these ranks: 0,3"),
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
}

OPTIONS = tuple(option for group in GROUPS.values() for option in group)
#: Other names: -np as mpiexec takes it.
ALIASES = {"-n": ("-np",), "--help": ("-h",)}
#: What other launchers call options of ours that go by names quite unlike theirs.
ELSEWHERE = {"--np": "-n N", "--nproc_per_node": "-n N", "--nproc-per-node": "-n N", "--nnodes": "--hosts"}

#: The keys of [launch] in a job file, and the kinds of their values: those of the options, the script and its words.
KEYS = {"script": FILE, "args": WORDS, **{option.key: option.kind for option in OPTIONS if option.key}}
