"""The README's table of results, made of the files in benchmarks/results: no number of it is typed by hand.

    python -m benchmarks.report [--check]

Writes the table between two comments of README.md. With --check it writes nothing, and fails if the README has another
table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import harness

RESULTS = harness.ROOT / "benchmarks" / "results"
README = harness.ROOT / "README.md"
BEGIN = "<!-- made by `python -m benchmarks.report` -->\n"
END = "<!-- end of results -->"
FILES = ("startup", "collectives", "overlap", "train_step", "zoo")
STARTUP = {
    "first": "shell to the first all-reduce of two ranks",
    "killed": "SIGKILL of a rank to the end of the job",
}
COLLECTIVES = (("all_reduce", 8, "8 B"), ("all_reduce", 1 << 20, "1 MiB"), ("all_reduce", 25 << 20, "25 MiB"))
STEPS = ("mlp-adamw", "gpt", "gpt2", "cnn")


def load(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def duration(seconds: float | None) -> str:
    """`1.20 s`, `27.3 ms`, `8.4 us`: three digits; "" for None."""
    if seconds is None:
        return ""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    return f"{seconds * factor:.3g} {unit}"


def row(what: str, ours: float, torch: float | None = None, mpi4py: float | None = None) -> str:
    faster = "" if torch is None else f"{torch / ours:.3g} x"
    return f"| {what} | **{duration(ours)}** | {duration(torch)} | {faster} | {duration(mpi4py)} |"


def rows() -> Iterator[str]:
    startup, collectives, overlap, steps, zoo = map(load, FILES)
    for matter, what in STARTUP.items():
        median = harness.medians(startup["rounds"][matter])
        yield row(what, median["ddp-launch"], median["torchrun"], median.get("mpiexec + mpi4py"))
    by_size = {(result["collective"], result["bytes"]): harness.medians(result["us"]) for result in collectives["rows"]}
    for name, nbytes, text in COLLECTIVES:
        us = by_size[name, nbytes]
        yield row(f"`{name}` of {text}, two ranks of a machine", *(us[key] / 1e6 for key in ("ours", "gloo", "raw")))
    task = overlap["tasks"]["mlp-512"]
    torch = {
        buckets: statistics.median(turns["step"]) for buckets, turns in task["theirs"].items() if buckets != "bare"
    }
    best = min(torch, key=lambda buckets: torch[buckets])
    text = (
        f"step of two hosts, 1 Gbit/s: {task['label']}; PyTorch with its best buckets, {best}: {duration(torch[best])}"
    )
    yield row(text, statistics.median(task["ours"]["default"]["step"]), torch["default"])
    for result in (*(steps["rows"][name] for name in STEPS), *zoo["rows"]["0"].values()):
        median = harness.medians(result["seconds"])
        yield row(f"step on one core: {result['label']}", median["ddp"], median["torch"])


def table() -> str:
    """Raises: SystemExit if the files are of several machines."""
    machines = {name: load(name)["machine"].rsplit(", load", 1)[0] for name in FILES}
    if len(set(machines.values())) != 1:
        sys.exit(f"these results are not of one machine: {machines}")
    about = load("train_step")
    dates = sorted({load(name)["date"] for name in FILES})
    versions = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("python", "torch", "numpy", "mpi4py", "mpich")
    )
    conditions = f"{machines['train_step']}; {versions}; {dates[0]} to {dates[-1]}; each row side by side in one run."
    head = ["| median of | here | PyTorch: torchrun, gloo, DDP | | mpi4py |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows(), "", f"{conditions} [How, and every other number](docs/benchmarks.md).\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the README has another table")
    check = parser.parse_args().check
    text = README.read_text()
    before, after = text.split(BEGIN)
    new = before + BEGIN + table() + END + after.split(END, 1)[1]
    if check and new != text:
        sys.exit("README.md has other results than benchmarks/results: run python -m benchmarks.report")
    README.write_text(new)


if __name__ == "__main__":
    main()
