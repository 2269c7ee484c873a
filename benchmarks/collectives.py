"""Every collective against mpi4py and torch.distributed (gloo), as `ddp-bench` measures them, with goals.

    python -m benchmarks.collectives [-n 2] [--only all_reduce] [--busy 1] [--json FILE]

"ours" and "comm.empty" are the same calls, on ordinary arrays and on arrays of `comm.empty`; "raw" is mpi4py. All
write into an `out` that exists; all_reduce in place, or (", out") into another array. With `--busy N`, N other
processes compute meanwhile, on whatever cores the system gives them. Without PyTorch the column gloo is left out.
Goals are for two ranks with a core each.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Goal, Rounds, at_least, at_most, over

KIB, MIB = 1 << 10, 1 << 20
SMALL = (8, KIB)
MIDDLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
LARGE = (25 * MIB, 100 * MIB)
OTHERS = ("reduce", "broadcast", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
ROWS = [
    *(("all_reduce", nbytes) for nbytes in (*SMALL, *MIDDLE, *LARGE)),
    *((name, nbytes) for name in OTHERS for nbytes in (KIB, MIB, 4 * MIB, 25 * MIB)),
    ("barrier", 8),
]
NAMES = {"ours mpi": "ours", "ours mpi empty": "comm.empty", "mpi4py": "raw", "torch-gloo": "gloo"}
LIMIT = 600.0  # s
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"  # ends with the benchmark


def goals(name: str, nbytes: int, us: Rounds, busy: int = 0) -> Iterator[Goal]:
    """What is promised of this row. busy: how many other processes compute"""
    label = f"{name} {size(nbytes)}"

    def ratio(a: str, b: str) -> float | None:
        return over(us[a], us[b]) if {a, b} <= set(us) else None

    def longer(a: str, b: str, limit: float) -> Goal:
        difference = statistics.median(us[a]) - statistics.median(us[b]) if {a, b} <= set(us) else None
        return at_most(f"{label}: {a} - {b}", limit, difference)

    def faster(a: str, b: str, limit: float) -> Goal:
        return at_least(f"{label}: {a} / {b}", limit, ratio(a, b))

    if busy:
        if (name, nbytes) == ("all_reduce", MIB):
            yield faster("gloo", "ours", 2.5)
    elif name != "all_reduce":
        if nbytes <= KIB:
            yield longer("ours", "raw", 3)
        else:
            yield at_most(f"{label}: ours / raw", 1.1, ratio("ours", "raw"))
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


def size(nbytes: int) -> str:
    """`size(65536) == "64 KiB"`."""
    unit, name = max((u, s) for u, s in ((1, "B"), (KIB, "KiB"), (MIB, "MiB")) if u <= max(1, nbytes))
    return f"{nbytes / unit:g} {name}"


def bench(name: str, nbytes: int, options: list[str], start: list[str]) -> Rounds:
    """Implementation → µs of each round, by `ddp-bench`; `start` and a module to run are a command.

    Raises: SystemExit if the ranks fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        sizes = [name, "-b", str(nbytes), "-e", str(nbytes), "--check", "--json", str(file)]
        baselines = "mpi4py,torch-gloo" if harness.has_torch() else "mpi4py"
        command = [*start, "-m", "launcher.bench", *sizes, "--vs", baselines, *options]
        environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
        done = subprocess.run(command, cwd=harness.ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
        if done.returncode != 0:
            raise SystemExit(f"ddp-bench {name} ended with {done.returncode}: {done.stdout}")
        (job,) = json.loads(file.read_text())["jobs"]
    return us(name, job["rows"])


def us(name: str, rows: list[dict[str, Any]]) -> Rounds:
    """Implementation → µs of each round, of ddp-bench's rows: out of place but for all_reduce, which has both."""
    found: Rounds = {}
    for row in rows:
        by, cells = NAMES[row["by"]], {place: [1e6 * s for s in cell["rounds"]] for place, cell in row["cells"].items()}
        if name != "all_reduce":
            found[by] = cells.get("out") or cells["in"]
        else:
            found |= {by if place == "in" else f"{by}, out": times for place, times in cells.items()}
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


def main() -> None:
    parser = harness.parser(__doc__, only=dict(ROWS))
    parser.add_argument("-n", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute meanwhile (default: 0)")
    args = parser.parse_args()
    rows, reached = [], []
    with computing(args.busy):
        for name, nbytes in [row for row in ROWS if row[0] in args.only]:
            found = bench(name, nbytes, ["-n", str(args.n), "--backend", "mpi", "--empty"], [sys.executable])
            rows.append({"collective": name, "bytes": nbytes, "us": found})
            reached += goals(name, nbytes, found, args.busy)
            medians = "".join(f"{key:>16} {each:9.1f}" for key, each in harness.medians(found).items())
            print(f"{name:<15}{size(nbytes):>8}{medians}  us", flush=True)
    harness.write(args.json, "collectives", reached, n=args.n, busy=args.busy, rows=rows)


if __name__ == "__main__":
    main()
