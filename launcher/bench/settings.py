"""The settings of `ddp-bench`: its command line, and the checks before ranks start."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.arguments import ArgumentParser, names, positive, value
from launcher.bench.collective_table import COLLECTIVES
from launcher.errors import UsageError

BACKENDS = ("auto", "mpi", "nccl", "threads", "single")
#: Backends whose ranks are all in one process: no launcher starts them.
ALONE = ("threads", "single")
OPS = ("sum", "mean", "max", "min", "prod")
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "complex64",
    "complex128",
)
# Baseline -> the module that it needs, which pip knows under the same name.
BASELINES = {"mpi4py": "mpi4py", "torch-gloo": "torch"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of ddp-bench.

    ranks: number of ranks; None: as many as a launcher started, else 2; 1 with the backend single
    minbytes, maxbytes, stepfactor: the sizes are minbytes, minbytes·stepfactor, minbytes·stepfactor², ... <= maxbytes
    iters: minimum number of calls measured for each size, implementation and place; None: as many as fit in `budget` s
    budget: seconds to measure each size, implementation and place
    warmup: calls of each implementation after its first two, before those that are measured
    json, plot: paths of files to be written

    Raises: UsageError if settings are invalid, or do not fit together.
    """

    collectives: tuple[str, ...]
    ranks: int | None = None
    minbytes: int = 8
    maxbytes: int = 32 << 20
    stepfactor: int = 2
    backend: str = "auto"
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
        for wrong, text in (
            (not self.collectives, f"no collective to measure: ddp-bench all, or one of {', '.join(COLLECTIVES)}"),
            (self.maxbytes < self.minbytes, f"maxbytes ({self.maxbytes}) is smaller than minbytes ({self.minbytes})"),
            (self.stepfactor < 2, f"stepfactor should be at least 2, not {self.stepfactor}"),
            (self.backend == "single" and self.ranks not in (None, 1), "backend single is a world of one: -n 1"),
            (
                self.backend in ("threads", "nccl") and self.vs,
                f"backend {self.backend} has no baselines: --backend mpi",
            ),
            (self.backend == "nccl" and self.empty, "--empty measures memory of the host: --backend mpi"),
            (self.backend == "nccl" and "bfloat16" in self.dtype, "CuPy has no bfloat16 arrays: --backend mpi"),
        ):
            if wrong:
                raise UsageError(text)

    def sizes(self) -> list[int]:
        """The sizes, in bytes."""
        sizes = [self.minbytes]
        while sizes[-1] * self.stepfactor <= self.maxbytes:
            sizes.append(sizes[-1] * self.stepfactor)
        return sizes


def parse(argv: Sequence[str]) -> Settings:
    """The settings of a command line.

    Raises: UsageError, of one sentence, for invalid options, a baseline that is not installed, or a file that cannot be
    written.
    """
    fields = parser().parse(argv)
    if "maxbytes" not in fields and "minbytes" in fields:
        fields["maxbytes"] = max(fields["minbytes"], Settings.maxbytes)
    requested = [name for choice in fields.pop("collectives", ()) for name in choice]
    settings = Settings(**fields, collectives=tuple(dict.fromkeys(requested)))
    for baseline in settings.vs:
        _require(f"baseline {baseline}", BASELINES[baseline])
    if settings.plot is not None:
        _require("--plot", "matplotlib")
        from launcher.bench.report import check_plot  # Imported late: it takes a while.

        check_plot(settings.plot)
    for path in filter(None, (settings.json, settings.plot)):
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.access(folder, os.W_OK):
            raise UsageError(f"{path} cannot be written")
    return settings


def _require(what: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{what} needs {module}, which is not installed: pip install {module}")


def parse_size(text: str) -> int:
    """Bytes: `parse_size("128M") == 128 << 20`; K, M and G are powers of 1024. Raises: ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    if match is None or int(match[1]) < 1:
        raise ValueError(text)
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


def parser() -> ArgumentParser:
    """The parser of the command line."""
    description = """\
Measures how fast collectives are, for a range of sizes. Starts its own ranks, unless a launcher has
started it as one of several ranks."""
    epilog = """\
Defaults stand in parentheses at the end of a line.

Exit code: 0; 1 if an element was wrong; 2 for wrong use; 130 after Ctrl-C; otherwise that of the
first rank that failed."""
    result = ArgumentParser(
        "ddp-bench", usage="ddp-bench COLLECTIVE... [OPTIONS]", description=description, epilog=epilog
    )
    count = value("a positive whole number", positive)
    size = value("bytes, as 512, 64K, 128M or 1G", parse_size)
    add = result.add_argument
    collectives = names("collective", COLLECTIVES)
    add(
        "collectives",
        nargs="*",
        type=collectives,
        metavar="COLLECTIVE",
        help=f"all, or one or more of {', '.join(COLLECTIVES)}",
    )
    add("-n", "--ranks", type=count, metavar="N", help="number of ranks to start (2)")
    add("-b", "--minbytes", type=size, metavar="SIZE", help="smallest size in bytes; K, M, G: powers of 1024 (8)")
    add("-e", "--maxbytes", type=size, metavar="SIZE", help="largest size in bytes (32M)")
    add("-f", "--stepfactor", type=count, metavar="F", help="each size is F times the one before (2)")
    add("-d", "--dtype", type=names("dtype", DTYPES), metavar="A,B", help="dtypes: float32, bfloat16, ... (float32)")
    add("-o", "--op", choices=OPS, help="how elements are reduced (sum)")
    add("--place", choices=("both", "out", "in"), help="measure out of place, in place, or both (both)")
    add("--backend", choices=BACKENDS, help="backend of the ranks (auto)")
    baselines = f"other libraries to measure on the same ranks: {', '.join(BASELINES)}"
    add("--vs", type=names("baseline", BASELINES), metavar="A,B", help=baselines)
    add("--empty", action="store_true", help="measure arrays of comm.empty, too, which the ranks of a host share")
    add("--check", action="store_true", help="compare every element with the correct result")
    add("--iters", type=count, metavar="N", help="measure at least N calls for each size, instead of --budget")
    seconds = value("a number of seconds", float)
    add("--budget", type=seconds, metavar="S", help="seconds to measure each size, implementation and place (0.1)")
    add("--warmup", type=count, metavar="N", help="number of calls before the measured ones (5)")
    add("--json", metavar="FILE", help="write settings, machine, versions and results to FILE")
    add("--plot", metavar="FILE.png", help="draw bus bandwidth against size; other suffixes work, too")
    return result
