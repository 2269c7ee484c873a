"""Every collective beside raw mpi4py and torch.distributed (gloo), in the same ranks and the same run.

    python benchmarks/collectives.py [-n 2] [--only all_reduce] [--rounds 11] [--apart] [--busy 1] [--json FILE]

Rounds alternate between the implementations, so that all of them see the same machine. Times are medians of the rounds;
ratios and differences are taken in each round, and their medians shown. How one turn is timed is told in
`collectives_worker.py`, what exactly is called in `implementations.py`: "ours" and "comm.empty" are the same calls, on
ordinary arrays and on arrays of `comm.empty`. All write into an `out` that is there already: all_reduce in place, or
(", out") into another array. With `--busy` so many other processes compute all the while, each on whatever core the
system gives it. Needs PyTorch for the comparison (`pip install '.[bench]'`); without it the column is left out. Goals
are printed, never asserted: they are for two ranks with a core each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where this file hides the package of its name from every benchmark.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]
if __name__ == "collectives":
    del sys.modules[__name__]
    sys.modules[__name__] = importlib.import_module(__name__)

from benchmarks import harness  # noqa: E402
from benchmarks.harness import Goal, Rounds, at_least, at_most, over  # noqa: E402
from benchmarks.implementations import TO_AND_FRO  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SMALL = (8, KIB)
MIDDLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
LARGE = (25 * MIB, 100 * MIB)
OTHERS = ("reduce", "broadcast", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", *TO_AND_FRO)
ROWS = [
    *(("all_reduce", nbytes) for nbytes in (*SMALL, *MIDDLE, *LARGE)),
    *((name, nbytes) for name in OTHERS for nbytes in (KIB, MIB, 4 * MIB, 25 * MIB)),
    ("barrier", 0),
]
LIMIT = 600.0  # s
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"  # ends with the benchmark


def more(us: Rounds, a: str, b: str) -> float:
    """How many µs longer a takes than b."""
    return statistics.median(x - y for x, y in zip(us[a], us[b], strict=True))


def goals(name: str, nbytes: int, us: Rounds, busy: int = 0) -> Iterator[Goal]:
    """What is promised of this row. busy: how many other processes compute"""

    label = f"{name} {size(nbytes)}".rstrip()

    def ratio(a: str, b: str) -> float | None:
        return over(us[a], us[b]) if {a, b} <= set(us) else None

    def longer(a: str, b: str, limit: float) -> Goal:
        return at_most(f"{label}: {a} - {b}", limit, more(us, a, b) if {a, b} <= set(us) else None)

    def slower(a: str, b: str, limit: float) -> Goal:
        return at_most(f"{label}: {a} / {b}", limit, ratio(a, b))

    def faster(a: str, b: str, limit: float) -> Goal:
        return at_least(f"{label}: {a} / {b}", limit, ratio(a, b))

    if busy:
        if (name, nbytes) == ("all_reduce", MIB):
            yield faster("gloo", "ours", 2.5)
    elif name in TO_AND_FRO and nbytes <= KIB:
        yield at_most(f"{label}: ours, us", 20, statistics.median(us["ours"]))
    elif name != "all_reduce":
        if nbytes <= KIB:
            yield longer("ours", "raw", 3)
        else:
            yield slower("ours", "raw", 1.1)
            yield faster("gloo", "ours", 1)
    elif nbytes in SMALL:
        yield longer("ours", "raw", 3)
        yield longer("ours, out", "raw, out", 3)
        yield faster("gloo", "ours", 30)
    elif nbytes in MIDDLE:
        yield faster("gloo", "comm.empty", 15)
        yield faster("gloo", "ours", 4)
    else:
        yield faster("gloo", "comm.empty", 8)
        yield faster("raw", "comm.empty", 4)
        yield faster("gloo", "ours", 3.5)
        yield faster("raw", "ours", 1 if nbytes < 100 * MIB else 2)


def moved(n: int, nbytes: int) -> int:
    """Bytes that n ranks' processors must read and write for one all-reduce of `nbytes` in each other's memory.

    Each rank reduces its n-th part: it reads n inputs and writes n results of nbytes / n, 2 * nbytes; all ranks
    together 2 * n * nbytes. In place every line that is written has been read, so that writing fetches nothing more.
    """
    return 2 * n * nbytes


def of_the_limit(found: dict[str, Any]) -> Iterator[Goal]:
    """The largest all-reduce in comm.empty against what the memory gives to the best plain kernel; prints both."""
    kernels = {name: statistics.median(rates) for name, rates in found["bandwidth"].items()}
    best = max(kernels, key=lambda name: kernels[name])
    n = found["n"]
    print(f"\nmemory, {n} ranks at once, arrays of {size(LARGE[-1])}, in GB/s as STREAM counts:")
    print("   ".join(f"{name}: {rate / 1e9:.1f}" for name, rate in kernels.items()))
    total = moved(n, LARGE[-1])
    print(f"all_reduce of {size(LARGE[-1])} reads and writes 2 x {n} x {size(LARGE[-1])} = {total / 1e6:.0f} MB")
    for row in found["rows"]:
        if (row["collective"], row["bytes"]) == ("all_reduce", LARGE[-1]) and "comm.empty" in row["us"]:
            rate = total / (statistics.median(row["us"]["comm.empty"]) * 1e-6)
            print(f"in comm.empty that is {rate / 1e9:.1f} GB/s")
            share = rate / kernels[best]
            yield at_least(f"all_reduce 100 MiB: share of {best!r}", 0.6, share)


def size(nbytes: int) -> str:
    """`size(65536) == "64 KiB"`; nothing for nothing."""
    if nbytes == 0:
        return ""
    unit, name = max((u, s) for u, s in ((1, "B"), (KIB, "KiB"), (MIB, "MiB")) if u <= nbytes)
    return f"{nbytes / unit:g} {name}"


def run(asked: dict[str, Any], start: list[str]) -> dict[str, Any]:
    """What the ranks found: `start` and a module to run are a command. Raises: SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder, "asked.json"), Path(folder, "found.json")
        job.write_text(json.dumps({**asked, "to": str(answer)}))
        command = [*start, "-m", "benchmarks.collectives_worker", str(job)]
        environ = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        done = subprocess.run(command, cwd=HERE.parent, env=environ, timeout=LIMIT)
        if done.returncode != 0:
            raise SystemExit(f"the ranks ended with {done.returncode}")
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


@contextlib.contextmanager
def computing(number: int) -> Iterator[None]:
    """That many processes compute for as long as the context lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Prints the table of one collective: µs, then ratios and differences."""
    columns = list(dict.fromkeys(key for row in rows for key in row["us"]))
    pairs = [("raw", "ours"), ("raw", "comm.empty"), ("gloo", "ours"), ("gloo", "comm.empty")]
    pairs = [pair for pair in pairs if set(pair) <= set(columns)]
    difference = {"raw", "ours"} <= set(columns)
    print(f"\n{name + ', us':<20}" + "".join(f"{key:>16}" for key in columns), end="")
    print("".join(f"{'/'.join(pair):>16}" for pair in pairs) + (f"{'ours - raw':>12}" if difference else ""))
    for row in rows:
        us = row["us"]
        print(f"{size(row['bytes']):<20}" + "".join(f"{statistics.median(us[key]):>16.1f}" for key in columns), end="")
        print("".join(f"{over(us[a], us[b]):>16.2f}" for a, b in pairs), end="")
        print(f"{more(us, 'ours', 'raw'):>12.1f}" if difference and row["bytes"] <= KIB else "")


def main() -> None:
    parser = harness.parser(__doc__, rounds=11, json_file="collectives.json")
    parser.add_argument("-n", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--only", choices=dict(ROWS), action="append", help="this one; may be given several times")
    parser.add_argument("--apart", action="store_true", help="a barrier before every call: latency, not throughput")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute meanwhile (default: 0)")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only is None or row[0] in args.only]
    asked = {"rows": rows, "rounds": args.rounds, "apart": args.apart}
    if "all_reduce" in dict(rows):
        asked["bandwidth"] = LARGE[-1]
    load = os.getloadavg()[0]
    with computing(args.busy):
        found = run(asked, [sys.executable, "-m", "launcher", "-n", str(args.n)])
    for name in dict.fromkeys(row["collective"] for row in found["rows"]):
        show(name, [row for row in found["rows"] if row["collective"] == name])
    reached = [goal for row in found["rows"] for goal in goals(row["collective"], row["bytes"], row["us"], args.busy)]
    if "bandwidth" in found and not args.busy:
        reached += of_the_limit(found)
    harness.show_goals(reached)
    print(f"load average before the run: {load:.2f} (every busy neighbour takes its core from a rank that waits)")
    about = {"apart": args.apart, "busy": args.busy, "load": load}
    harness.write(args.json, "collectives", **about, **found, goals=[vars(goal) for goal in reached])


if __name__ == "__main__":
    main()
