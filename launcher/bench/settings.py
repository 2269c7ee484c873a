"""What `ddp-bench` is asked to measure: command line, config files, and what is checked before ranks start."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.arguments import ArgumentParser, nearest
from launcher.bench.collective_table import KINDS
from launcher.config import read_toml, word
from launcher.errors import UsageError

BACKENDS = ("auto", "mpi", "nccl", "threads", "single")
#: Backends whose ranks share one process, or that have only one: no engine starts them.
ALONE = ("threads", "single")
BASELINES = ("mpi4py", "torch-gloo")
OPS = ("sum", "mean", "max", "min", "prod")
PLACES = ("both", "out", "in")
# Names and bytes, so that wrong use is reported before NumPy is loaded.
DTYPES = dict.fromkeys(("bool", "int8", "uint8"), 1)
DTYPES |= dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2)
DTYPES |= dict.fromkeys(("float32", "int32", "uint32"), 4)
DTYPES |= dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8)
DTYPES |= {"complex128": 16}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


_EXTRA = "pip install 'ddp-runtime[bench]'"
_MODULES = {"mpi4py": ("mpi4py", "pip install mpi4py"), "torch-gloo": ("torch", _EXTRA)}
# Of each implementation of ours, or of a baseline, on each rank: what is read and what is written.
_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of ddp-bench; every value has been checked by itself and with the others.

    ranks: None means what the launcher gives, else 2
    sizes: minbytes, then times stepfactor or plus stepbytes, up to maxbytes
    iters: calls measured for each size; None: as many as fit in `budget` seconds
    warmup: calls before them, of each implementation
    json, plot: paths of files to be written

    Raises: UsageError, in one sentence.
    """

    collectives: tuple[str, ...]
    ranks: int | None = None
    minbytes: int = 8
    maxbytes: int = 32 << 20
    stepfactor: int | None = None
    stepbytes: int | None = None
    backend: tuple[str, ...] = ("auto",)
    dtype: tuple[str, ...] = ("float32",)
    op: str = "sum"
    place: str = "both"
    vs: tuple[str, ...] = ()
    empty: bool = False
    check: bool = False
    iters: int | None = None
    warmup: int = 5
    budget: float = 0.1
    json: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        if not self.collectives:
            raise UsageError(f"no collective to measure: ddp-bench all, or one of {', '.join(KINDS)}")
        for what, names, known in (
            ("collective", self.collectives, tuple(KINDS)),
            ("backend", self.backend, BACKENDS),
            ("dtype", self.dtype, tuple(DTYPES)),
            ("op", (self.op,), OPS),
            ("place", (self.place,), PLACES),
            ("baseline", self.vs, BASELINES),
        ):
            for name in names:
                if name not in known:
                    raise UsageError(f"unknown {what} {name}{nearest(name, known) or ': one of ' + ', '.join(known)}")
        for name, value in (("ranks", self.ranks), ("iters", self.iters), ("warmup", self.warmup)):
            if value is not None and value < 1:
                raise UsageError(f"{name} should be at least 1, not {value}")
        if not 0 < self.budget < float("inf"):
            raise UsageError(f"budget should be a number of seconds above 0, not {self.budget}")
        self._check_sizes()
        self._check_op()
        if self.ranks not in (None, 1) and "single" in self.backend:
            raise UsageError(f"backend single is a world of one: -n 1, not {self.ranks}")
        if self.vs and set(self.backend) <= {"threads", "nccl"}:
            backend = self.backend[0]
            lack = "ranks that are processes" if backend == "threads" else "arrays of the host"
            raise UsageError(f"baseline {self.vs[0]} needs {lack}, backend {backend} has none: --backend mpi")
        if self.empty and set(self.backend) == {"nccl"}:
            raise UsageError("--empty measures memory of the host, backend nccl has none: --backend mpi")
        if "nccl" in self.backend and "bfloat16" in self.dtype:
            raise UsageError("CuPy has no bfloat16 arrays, which backend nccl would need")
        for name in self.collectives:
            if (least := KINDS[name].least_ranks) > min(map(self.world, self.backend)) and len(self.collectives) == 1:
                raise UsageError(f"{name} needs at least {least} ranks")

    def _check_sizes(self) -> None:
        if self.minbytes < 1:
            raise UsageError(f"minbytes should be at least 1, not {self.minbytes}")
        if self.maxbytes < self.minbytes:
            raise UsageError(f"maxbytes ({self.maxbytes}) is smaller than minbytes ({self.minbytes})")
        if self.stepfactor is not None and self.stepbytes is not None:
            raise UsageError("sizes grow by a factor (-f) or by an increment (-i), not by both")
        if self.stepfactor is not None and self.stepfactor < 2:
            raise UsageError(f"stepfactor should be at least 2, not {self.stepfactor}")
        if self.stepbytes is not None and self.stepbytes < 1:
            raise UsageError(f"stepbytes should be at least 1, not {self.stepbytes}")

    def _check_op(self) -> None:
        if not any(KINDS[name].reduces for name in self.collectives):
            return
        for dtype in self.dtype:
            if dtype == "bool" and self.op not in ("max", "min"):
                raise UsageError(f"bool has max and min only, not {self.op}")
            if dtype.startswith("complex") and self.op in ("max", "min"):
                raise UsageError(f"{dtype} has no {self.op}: complex numbers have no order")

    def world(self, backend: str) -> int:
        """How many ranks a job of that backend has."""
        return self.ranks or (1 if backend == "single" else 2)

    def sizes(self) -> list[int]:
        """The sizes asked for, in bytes."""
        found, size = [], self.minbytes
        while size <= self.maxbytes:
            found.append(size)
            size = size + self.stepbytes if self.stepbytes else size * (self.stepfactor or 2)
        return found

    def encode(self) -> str:
        """As one word of a command line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def decode(text: str) -> Settings:
        """What `encode` made a word of."""
        fields: dict[str, Any] = json.loads(text)
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return Settings(**fields)


def parse_size(text: str) -> int:
    """Bytes: `parse_size("128M") == 128 << 20`; K, M and G are powers of 1024. Raises: ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    if match is None:
        raise ValueError(text)
    return int(match[1]) << _UNITS[match[2]]


def help_text() -> str:
    """What --help prints."""
    return _parser().format_help()


def parse(argv: Sequence[str]) -> Settings:
    """The settings that a command line asks for, with the config file that it names.

    Raises: UsageError, in one sentence.
    """
    fields = _parser().parse(argv)
    if (path := fields.pop("config", None)) is not None:
        found = read_toml(path, "the settings file")
        try:
            fields = _parser().parse(words(found)) | fields
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    if "maxbytes" not in fields and "minbytes" in fields:
        fields["maxbytes"] = max(fields["minbytes"], Settings.maxbytes)
    names = [each for text in fields.pop("collectives", ()) for each in (KINDS if text == "all" else _names(text))]
    return Settings(**fields, collectives=tuple(dict.fromkeys(names)))


def words(table: dict[str, Any]) -> list[str]:
    """The command line that a file's keys stand for.

    >>> words({"collective": "all_reduce", "maxbytes": "1M", "check": True, "vs": ["mpi4py", "torch-gloo"]})
    ['all_reduce', '--maxbytes=1M', '--check', '--vs=mpi4py,torch-gloo']
    Raises: UsageError for an unknown key, or a value that is no option's.
    """
    found = []
    known = ("collective", *(field.name for field in dataclasses.fields(Settings) if field.name != "collectives"))
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"unknown key {key}{nearest(key, known)}")
        if key in ("check", "empty"):
            if not isinstance(value, bool):
                raise UsageError(f"{key} should be true or false, not {value!r}")
            found += [f"--{key}"] * value
            continue
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in values):
            raise UsageError(f"{key} should be a string, a number or a list of these, not {value!r}")
        found += [word(each) for each in values] if key == "collective" else [f"--{key}={','.join(map(word, values))}"]
    return found


_DESCRIPTION = f"""\
Measures collectives for a range of sizes, on ranks of its own or on those of the launcher that started it.

COLLECTIVE: all, or some of {", ".join([*KINDS][:6])},
            {", ".join([*KINDS][6:])}
"""
_EPILOG = "Exit code: 0; 1 if an element was wrong; 2 for wrong use; 130 after Ctrl-C; else that of a failed rank."


def _parser() -> ArgumentParser:
    usage = "ddp-bench COLLECTIVE... [OPTIONS]"
    parser = ArgumentParser("ddp-bench", usage=usage, description=_DESCRIPTION, epilog=_EPILOG)
    count, size = _value(int, "a whole number"), _value(parse_size, "a number of bytes, as 512, 64K, 128M or 1G")
    seconds = _value(float, "a number of seconds")
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE", help="what is measured")
    add("-n", "--ranks", type=count, metavar="N", help="number of ranks (2)")
    add("-b", "--minbytes", type=size, metavar="SIZE", help="smallest size (8); K, M and G are powers of 1024")
    add("-e", "--maxbytes", type=size, metavar="SIZE", help="largest size (32M)")
    add("-f", "--stepfactor", type=count, metavar="F", help="each size is F times the last (2), or")
    add("-i", "--stepbytes", type=size, metavar="SIZE", help="larger by SIZE")
    add("-d", "--dtype", type=_names, metavar="A,B", help="float32, bfloat16, int8, ... (float32)")
    add("-o", "--op", help=f"{', '.join(OPS)} (sum)")
    add("--place", metavar="P", help="both, out (of place) or in (place) (both)")
    add("--backend", type=_names, metavar="A,B", help=f"{', '.join(BACKENDS)} (auto); several are measured in turn")
    add("--vs", type=_names, metavar="A,B", help=f"baselines, on the same ranks: {', '.join(BASELINES)}")
    add("--empty", action="store_true", help="ours a second time, on arrays of comm.empty")
    add("--check", action="store_true", help="compare every element with what it must be")
    add("--iters", type=count, metavar="N", help="calls measured for each size, instead of --budget")
    add("--budget", type=seconds, metavar="S", help="seconds for each size, implementation and place (0.1)")
    add("--warmup", type=count, metavar="N", help="calls before that (5)")
    add("--json", metavar="FILE", help="settings, machine, versions and results")
    add("--plot", metavar="FILE.png", help="bandwidth against size")
    add("--config", metavar="FILE", help="these options in TOML, without dashes; the command line wins")
    return parser


def _value(parse_text: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """For argparse's `type`: parse_text, with an error that names what the value should be."""

    def parsed(text: str) -> Any:
        try:
            return parse_text(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be {what}, not {text!r}") from None

    return parsed


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def check_environment(settings: Settings, memory: int | None) -> None:
    """Checks that baselines and matplotlib are installed if they are needed, and that files can be written.

    memory: bytes available for all ranks together; None: unknown
    Raises: UsageError, in one sentence.
    """
    for baseline in settings.vs:
        module, remedy = _MODULES[baseline]
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"baseline {baseline} needs {module}, which is not installed: {remedy}")
    if settings.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--plot needs matplotlib, which is not installed: {_EXTRA}")
        if not settings.plot.lower().endswith(".png"):
            raise UsageError(f"the plot is a PNG, so its name should end in .png: {settings.plot}")
    for path in (settings.json, settings.plot):
        if path is not None:
            _check_writable(path)
    for backend in settings.backend:
        need = footprint(settings, settings.world(backend))
        if memory is not None and need > memory:
            asked, there = f"{need / 1e9:.1f} GB", f"{memory / 1e9:.1f} GB"
            raise UsageError(f"sizes up to {settings.maxbytes} bytes need {asked} in all, {there} are available")


def footprint(settings: Settings, ranks: int) -> int:
    """Bytes of all buffers of a job."""
    return ranks * (1 + settings.empty + len(settings.vs)) * _BUFFERS * settings.maxbytes


def available_memory() -> int | None:
    """Bytes that can be had without swapping, as the kernel estimates it."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:  # not on this system
        pass
    return None


def _check_writable(path: str) -> None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory, not a file to be written")
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder {folder} for {os.path.basename(path)}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written")
