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
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Goal, Rounds, at_least, at_most, median_ratio
from launcher.linux import format_bytes

KIB = 1 << 10
MIB = 1 << 20
SMALL = (8, KIB)
MIDDLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
ALL_REDUCE = ("all_reduce",)
OTHERS = ("reduce", "broadcast", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
ROWS = [
    *(("all_reduce", nbytes) for nbytes in (*SMALL, *MIDDLE, 25 * MIB, 100 * MIB)),
    *((name, nbytes) for name in OTHERS for nbytes in (KIB, MIB, 4 * MIB, 25 * MIB)),
    ("barrier", 8),
]
# Collectives, their sizes, what is compared ("-": medians of us; "/": ratio of the rounds), at most or at least, limit.
PROMISES = (
    (ALL_REDUCE, SMALL, "ours - raw", at_most, 3),
    (ALL_REDUCE, SMALL, "ours, out - raw, out", at_most, 3),
    (ALL_REDUCE, SMALL, "gloo / ours", at_least, 30),
    (ALL_REDUCE, MIDDLE, "gloo / comm.empty", at_least, 15),
    (ALL_REDUCE, MIDDLE, "gloo / ours", at_least, 4),
    (ALL_REDUCE, (25 * MIB, 100 * MIB), "gloo / comm.empty", at_least, 8),
    (ALL_REDUCE, (25 * MIB, 100 * MIB), "raw / comm.empty", at_least, 4),
    (ALL_REDUCE, (25 * MIB, 100 * MIB), "gloo / ours", at_least, 3.5),
    (ALL_REDUCE, (25 * MIB,), "raw / ours", at_least, 1),
    (ALL_REDUCE, (100 * MIB,), "raw / ours", at_least, 2),
    ((*OTHERS, "barrier"), SMALL, "ours - raw", at_most, 3),
    (OTHERS, (MIB, 4 * MIB, 25 * MIB), "ours / raw", at_most, 1.1),
    (OTHERS, (MIB, 4 * MIB, 25 * MIB), "gloo / ours", at_least, 1),
)
BUSY_PROMISES = ((ALL_REDUCE, (MIB,), "gloo / ours", at_least, 2.5),)
NAMES = {"ours mpi": "ours", "ours mpi empty": "comm.empty", "mpi4py": "raw", "torch-gloo": "gloo"}
LIMIT = 600.0  # s
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"  # ends with the benchmark


def goals(name: str, nbytes: int, us: Rounds, busy: int = 0) -> Iterator[Goal]:
    """What is promised of this row. busy: how many other processes compute"""
    for names, sizes, what, goal, limit in BUSY_PROMISES if busy else PROMISES:
        if name in names and nbytes in sizes:
            a, sign, b = re.split(" ([-/]) ", what)
            measured = None
            if {a, b} <= set(us):
                measured = (
                    median_ratio(us[a], us[b]) if sign == "/" else statistics.median(us[a]) - statistics.median(us[b])
                )
            yield goal(f"{name} {format_bytes(nbytes)}: {what}", limit, measured)


def bench(name: str, nbytes: int, options: list[str], start: Sequence[str] = (sys.executable,)) -> Rounds:
    """Implementation → us of each round, by `ddp-bench`: out of place but for all_reduce, which has both.

    start: a module to run makes it a command
    Raises: SystemExit if the ranks fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        sizes = [name, "-b", str(nbytes), "-e", str(nbytes), "--check", "--json", str(file)]
        baselines = "mpi4py,torch-gloo" if harness.has_torch() else "mpi4py"
        command = [*start, "-m", "launcher.bench", *sizes, "--vs", baselines, *options]
        environ = {**os.environ, "PYTHONPATH": harness.python_path(harness.ROOT)}
        completed = subprocess.run(
            command, cwd=harness.ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=LIMIT
        )
        if completed.returncode != 0:
            raise SystemExit(f"ddp-bench {name} ended with {completed.returncode}: {completed.stdout}")
        rows = json.loads(file.read_text())["rows"]
    us: Rounds = {}
    for row in sorted(rows, key=lambda row: row["place"]):
        key = NAMES[row["by"]] + (", out" if name == "all_reduce" and row["place"] == "out" else "")
        us[key] = [1e6 * seconds for seconds in row["rounds"]]  # "out" comes after "in"
    return us


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
    parser.add_argument("-n", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute meanwhile (default: 0)")
    args = parser.parse_args()
    rows = []
    reached = []
    with computing(args.busy):
        for name, nbytes in [row for row in ROWS if row[0] in args.only]:
            us = bench(name, nbytes, ["-n", str(args.n), "--backend", "mpi", "--empty"])
            rows.append({"collective": name, "bytes": nbytes, "us": us})
            reached += goals(name, nbytes, us, args.busy)
            cells = [f"{key} {value:.1f}" for key, value in harness.medians(us).items()]
            print(harness.row(f"{name} {format_bytes(nbytes)}", cells, 23, 26), " us", flush=True)
    harness.write(args.json, "collectives", reached, n=args.n, busy=args.busy, rows=rows)


if __name__ == "__main__":
    main()
