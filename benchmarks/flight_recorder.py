"""What the flight recorder costs: nanoseconds a call that it enters, and a sample of the sampler.

    python benchmarks/flight_recorder.py [--rounds 20] [--json FILE]

Each round times every entry once, in a loop of its own; a loop's own cost is taken off. No NumPy, no MPI: one process.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

from benchmarks import harness  # noqa: E402
from collectives.flight.reader import FlightReader  # noqa: E402
from collectives.flight.recorder import Recorder  # noqa: E402
from collectives.flight.report import read  # noqa: E402
from collectives.flight.sampler import PERIOD, main_thread_position  # noqa: E402

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
    args = harness.parser(__doc__, rounds=20, json_file="flight_recorder.json").parse_args()
    empty = min(timeit.repeat(lambda: None, number=CALLS)) / CALLS
    calls = {
        name: lambda entry=entry, number=number: 1e9 * (harness.seconds(entry, number) - empty)
        for name, (entry, number) in entries(Recorder(rank=0, size=1)).items()
    }
    times = harness.take_turns(calls, args.rounds, warmup=1)
    print(f"{'one entry, ns':<30} {'median':>10} {'min':>10} {'max':>10}")
    for name, taken in times.items():
        print(f"{name:<30} {harness.spread(taken, digits=0)}")
    medians = harness.medians(times)
    share = medians["sample of the Python position"] / (PERIOD * 1e9)
    print(f"the sampler takes {share:.4%} of one core, once every {PERIOD:g} s")
    harness.show_goals([harness.at_most("begin + end, ns", GOAL, medians["begin + end"])])
    harness.write(args.json, "flight_recorder", nanoseconds=times, medians=medians, sampler_share_of_a_core=share)


if __name__ == "__main__":
    main()
