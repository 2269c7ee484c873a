"""Makes tables of benchmarks/results/*.json for the site's page on benchmarks.

The files differ in shape: whatever holds numbers becomes a row, named by the keys that lead to it. A list of numbers is
one measurement a round, and shown as its median.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.linux import format_bytes

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
# These entries are said above the tables, computed from others, or settings.
SKIPPED = {
    "benchmark",
    "buckets",
    "date",
    "goals",
    "idle",
    "machine",
    "medians",
    "ratios_to_pytorch",
    "units",
    "versions",
}
INTRODUCTION = """Medians over rounds, made of the files of `benchmarks/results`; `raw` is mpi4py. Where a row names no
unit, times are seconds, memory is MiB, and what was sent is bytes."""
Row = tuple[str, dict[str, float]]


def markdown() -> str:
    """A section with the tables of every file."""
    sections = [section(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return "\n\n".join(["## Every committed result", INTRODUCTION, *sections]) + "\n"


def section(name: str, result: dict[str, Any]) -> str:
    parts = [f"### {name}", about(result)]
    goals = [
        [goal["what"], goal["wanted"], number(goal["measured"]), "yes" if goal["met"] else "no"]
        for goal in result.get("goals", [])
    ]
    if goals:
        parts.append(table(["goal", "wanted", "measured", "met"], goals))
    tables: list[tuple[list[str], list[Row]]] = []
    for label, values in rows(result, "", result.get("units", {})):
        columns, content = next((made for made in tables if set(made[0]) & set(values)), ([], []))
        if not columns:
            tables.append((columns, content))
        columns += [column for column in values if column not in columns]
        content.append((label, values))
    for columns, content in tables:
        lines = [
            [label, *(number(values[key]) if key in values else "" for key in columns)] for label, values in content
        ]
        parts.append(table(["median of", *columns], lines))
    return "\n\n".join(parts)


def about(result: dict[str, Any]) -> str:
    """When and where it was measured."""
    machine = result.get("machine", {})
    words = [str(result.get("date") or result["when"][:10])]
    words += [machine] if isinstance(machine, str) else [f"python {machine['python']}", f"{machine['cpus']} cores"]
    words += [f"{key} {value}" for key, value in result.get("versions", {}).items() if value and key != "mpi"]
    words += [f"{key} {value:.3g}" for key, value in result.items() if is_number(value)]
    words += [f"{key} {result[key]}" for key in ("rate", "hosts") if key in result]
    return ", ".join(words) + "."


def rows(value: Any, label: str, units: dict[str, str]) -> Iterator[Row]:
    """The numbers of each dict within `value`; those of the outermost are settings."""
    if isinstance(value, list):
        if value and all(isinstance(entry, dict) and "wrong" in entry for entry in value):
            yield label, {"cases": len(value), "wrong": sum(bool(entry["wrong"]) for entry in value)}
            return
        for entry in value:
            if isinstance(entry, dict):
                names = [entry[key] for key in ("collective", "script") if key in entry]
                names += [format_bytes(entry["bytes"])] if "bytes" in entry else []
                yield from rows(
                    {key: part for key, part in entry.items() if key != "bytes"}, joined(label, *names), units
                )
    elif isinstance(value, dict):
        label = joined(label.rpartition(", ")[0], value["label"]) if "label" in value else label
        numbers = {key: median(entry) for key, entry in value.items() if is_series(entry)}
        if "floor_seconds" in value:
            numbers["ours / floor"] = median(value["seconds"]["ddp"]) / value["floor_seconds"]
        if label and numbers:
            yield label, numbers
        for key, entry in value.items():
            if key not in SKIPPED:
                yield from rows(entry, joined(label, key, *([units[key]] if key in units else [])), units)


def joined(*words: str) -> str:
    return ", ".join(word for word in words if word and word not in ("rows", "results", "rounds", "tasks"))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_series(value: Any) -> bool:
    return is_number(value) or (isinstance(value, list) and bool(value) and all(map(is_number, value)))


def median(value: float | list[float]) -> float:
    return statistics.median(value) if isinstance(value, list) else value


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [head, rule, *lines]
    )
