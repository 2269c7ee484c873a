"""What to measure: one frozen value, whether it came from the command line, a TOML file or a launcher's rank."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from launcher.bench.kinds import KINDS
from launcher.job import UsageError
from launcher.settings.options import nearest

BACKENDS = ("auto", "mpi", "nccl", "threads", "single")
#: Backends whose ranks share one process, or that have only one: no engine starts them.
ALONE = ("threads", "single")
RIVALS = ("mpi4py", "torch-gloo")
OPS = ("sum", "mean", "max", "min", "prod")
PLACES = ("both", "out", "in")
# Names and bytes, so that wrong use is told before NumPy is loaded.
DTYPES = dict.fromkeys(("bool", "int8", "uint8"), 1)
DTYPES |= dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2)
DTYPES |= dict.fromkeys(("float32", "int32", "uint32"), 4)
DTYPES |= dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8)
DTYPES |= {"complex128": 16}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of ddp-bench; every value has been checked by itself and with the others.

    ranks: None means what the launcher gives, else 2
    sizes: minbytes, then times stepfactor or plus stepbytes, up to maxbytes
    iters: calls measured for each size; None: as many as fit in `budget` seconds
    warmup: calls before them, of each contestant
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
            ("rival", self.vs, RIVALS),
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
            raise UsageError(f"rival {self.vs[0]} needs {lack}, backend {backend} has none: --backend mpi")
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
