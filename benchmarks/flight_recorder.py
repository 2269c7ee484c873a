"""What the flight recorder costs: nanoseconds a call that it enters, and a sample of the sampler.

    python benchmarks/flight_recorder.py [--rounds 20] [--json FILE]

Each round times every entry once, in a loop of its own; a loop's own cost is taken off. No NumPy, no MPI: one process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from collectives.flight.reader import FlightReader
from collectives.flight.recorder import Recorder
from collectives.flight.report import read
from collectives.flight.sampler import PERIOD, main_thread_position

CALLS = 20_000  # entries a loop
GOAL = 1_000.0  # ns for a call: its beginning and its end, the signature known


def entries(recorder: Recorder) -> dict[str, tuple[Callable[[], object], int]]:
    """Name → what is timed, and how often in a loop."""
    world = recorder.communicator("world")
    known = ("all_reduce", "float32", (512, 10), "sum", "/home/me/train.py", 88)
    signature = recorder.intern(*known)
    sizes = iter(range(10**9))
    reader = FlightReader(recorder.peek)

    def sample() -> None:
        where = main_thread_position()
        assert where is not None
        recorder.record_position(*where)

    return {
        "begin + end": (lambda: recorder.end(recorder.begin(world, 417, signature)), CALLS),
        "intern, known": (lambda: recorder.intern(*known), CALLS),
        "intern + begin + end": (lambda: recorder.end(recorder.begin(world, 417, recorder.intern(*known))), CALLS),
        "intern, new": (lambda: recorder.intern("gather", "float32", (next(sizes), 10), "", "/a/train.py", 88), CALLS),
        "sample of the Python position": (sample, 1_000),
        "reading the record": (lambda: read(reader), 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds after one warm-up (default: 20)")
    path = Path("flight_recorder.json")
    parser.add_argument("--json", type=Path, default=path, help=f"where the results go ({path})")
    args = parser.parse_args()
    timed = entries(Recorder(rank=0, size=1))
    times: dict[str, list[float]] = {name: [] for name in timed}
    for round_ in range(args.rounds + 1):
        empty = timeit.timeit(lambda: None, number=CALLS) / CALLS
        for name, (entry, number) in timed.items():
            each = timeit.timeit(entry, number=number, timer=time.perf_counter) / number - empty
            if round_ > 0:
                times[name].append(each * 1e9)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    print(f"{'one entry':<30} {'median':>11} {'min':>11} {'max':>11}")
    for name, taken in times.items():
        print(f"{name:<30} {medians[name]:8.0f} ns {min(taken):8.0f} ns {max(taken):8.0f} ns")
    share = medians["sample of the Python position"] / (PERIOD * 1e9)
    print(f"begin + end is {medians['begin + end'] / GOAL:.2f} of the goal of {GOAL:.0f} ns")
    print(f"the sampler takes {share:.4%} of one core, once every {PERIOD:g} s")
    results = {
        "benchmark": "flight_recorder",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "nanoseconds": times,
        "medians": medians,
        "share_of_goal": medians["begin + end"] / GOAL,
        "sampler_share_of_a_core": share,
    }
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
