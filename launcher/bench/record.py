"""What is kept of a run: settings, machine, versions and results, as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from launcher.bench.fit import Line
from launcher.bench.settings import Settings
from launcher.bench.table import Cell, Fitted, Row
from launcher.job import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one job, the ranks of one backend, brought.

    refusals: what a contestant could not do, a sentence each; versions: of what it ran on
    """

    backend: str
    ranks: int
    nodes: int
    versions: dict[str, str]
    rows: tuple[Row, ...]
    fits: tuple[Fitted, ...]
    refusals: tuple[str, ...]

    @property
    def wrong(self) -> int:
        """Elements that were not what they must be."""
        return sum(cell.wrong or 0 for row in self.rows for cell in row.cells.values())

    def encode(self) -> dict[str, Any]:
        """As JSON's types. latency_us and bandwidth_gbs (1e9 bytes a second) are the fitted ones."""
        document = dataclasses.asdict(self)
        for fitted, each in zip(document["fits"], self.fits, strict=True):
            latency, slope = each.line
            fitted |= {"latency_us": latency * 1e6, "bandwidth_gbs": 1e-9 / slope if slope else None}
            fitted["line"] = list(each.line)
        return document

    @staticmethod
    def decode(document: dict[str, Any]) -> Outcome:
        """What `encode` took apart."""
        rows = []
        for row in document["rows"]:
            cells = {place: Cell(**{**cell, "rounds": tuple(cell["rounds"])}) for place, cell in row["cells"].items()}
            rows.append(Row(**{**row, "cells": cells}))
        fields = ("collective", "by", "dtype", "place")
        fits = [Fitted(**{name: each[name] for name in fields}, line=Line(*each["line"])) for each in document["fits"]]
        refusals = tuple(document["refusals"])
        return Outcome(**{**document, "rows": tuple(rows), "fits": tuple(fits), "refusals": refusals})


def report(settings: Settings, outcomes: Sequence[Outcome], now: datetime.datetime) -> dict[str, Any]:
    """The whole of a run."""
    return {
        "date": now.isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(settings),
        "machine": machine(),
        "jobs": [outcome.encode() for outcome in outcomes],
    }


def machine() -> dict[str, Any]:
    """What this machine is."""
    return {
        "host": platform.node(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def cpu() -> str:
    """The processor's name, as the kernel knows it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:  # not on this system
        pass
    return platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of each library of ours that this process has loaded."""
    found = {"python": platform.python_version()}
    for name in ("ddp-runtime", "numpy", "mpi4py", "torch", "cupy"):
        if name == "ddp-runtime" or name in sys.modules:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = str(getattr(sys.modules.get(name), "__version__", "not installed"))
    return found


def save(path: str, document: dict[str, Any]) -> None:
    """Writes it. Raises: UsageError if the file cannot be written after all."""
    try:
        with open(path, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
