"""all_reduce over a wire: two hosts of one rank each, joined by a cable of a known rate. Needs Linux's root, and MPICH.

    python benchmarks/two_hosts.py [--rate 1gbit] [--rounds 7] [--json FILE]

The hosts are network namespaces of this machine (tests/cluster/hosts.sh, which says what may be lacking), the rate is
tc's. Two ranks that reduce N bytes must each send N: half of x to be added, and half of the result. So the wire's
limit is the time that a bare TCP connection takes for N bytes each way at once, measured in the same rounds. By the
rate alone it would be N / (rate * 1448 / 1514): tc counts frames of 1514 bytes, 1448 of which are data (Ethernet,
IPv4, TCP with timestamps), and lets 256 KiB go at once after a pause.

The job runs twice: as it is by default, and with every call compared between the ranks (`check="always"`).
"""

from __future__ import annotations

import contextlib
import inspect
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

import collectives as package  # noqa: E402
from benchmarks import collectives, harness  # noqa: E402
from launcher.engines.mpiexec import MPICH, find_mpiexec, mpi_family  # noqa: E402

SCRIPT = HERE.parent / "tests" / "cluster" / "hosts.sh"
ADDRESS = "10.0.0.1"  # of the first host
READY = 30.0  # s
MIB = 1 << 20
SMALL = [("all_reduce", 8), ("all_reduce", 1 << 10), ("all_reduce", 64 << 10), ("broadcast", 1 << 10), ("barrier", 0)]
LARGE = [("all_reduce", 25 * MIB), ("all_reduce", 100 * MIB)]
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@contextlib.contextmanager
def hosts(rate: str) -> Iterator[list[str]]:
    """The names of two hosts, for as long as the context lasts. Raises: SystemExit with what this machine lacks."""
    process = subprocess.Popen(
        [str(SCRIPT), "up", rate], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        heard, _, _ = select.select([process.stdout], [], [], READY)
        said = process.stdout.readline().split() if heard else []
        if said[:1] != ["ready"]:
            raise SystemExit(" ".join(said) or "the hosts were not ready in time")
        yield said[1:]
    finally:
        process.stdin.close()  # the hosts go with the script
        try:
            process.wait(READY)
        finally:
            process.kill()
            process.wait()


def start(names: list[str]) -> list[str]:
    """The command that starts one Python on each host, the first on the first."""
    mpiexec = find_mpiexec()
    if mpi_family(mpiexec) != MPICH:
        raise SystemExit("the way to two hosts on one machine is known for MPICH alone")
    # The hosts share one kernel: neither the MPI nor gloo may find a way from process to process beside the wire.
    options = ["-launcher", "ssh", "-launcher-exec", str(SCRIPT), "-localhost", ADDRESS, "-hosts", ",".join(names)]
    environ = ["-genv", "UCX_TLS", "tcp,self", "-genv", "GLOO_SOCKET_IFNAME", "eth0", "-genv", "OMP_NUM_THREADS", "1"]
    return [str(SCRIPT), names[0], mpiexec, *options, "-ppn", "1", *environ, sys.executable]


def by_the_rate(nbytes: int, rate: str) -> float:
    """Seconds that `nbytes` take by the rate alone, in full frames."""
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return nbytes * 8 * 1514 / 1448 / (float(number) * UNITS[rate[len(number) :]])


def show(found: dict[str, Any], rate: str) -> list[harness.Goal]:
    """Prints a run's large rows against the wire. Returns what is promised of them."""
    goals = []
    head = ("ours", "raw", "gloo", "wire", "wire/ours", "wire/gloo", "by the rate")
    print(f"\n{'all_reduce, ms':<16}" + "".join(f"{each:>12}" for each in head))
    for row in found["rows"]:
        if row["bytes"] < MIB:
            continue
        us = row["us"]
        ms = [statistics.median(us[key]) / 1e3 if key in us else float("nan") for key in head[:4]]
        shares = [harness.over(us["wire"], us[key]) if key in us else float("nan") for key in ("ours", "gloo")]
        label = collectives.size(row["bytes"])
        limit = by_the_rate(row["bytes"], rate)
        print(f"{label:<16}" + "".join(f"{each:>12.1f}" for each in ms), end="")
        print("".join(f"{each:>11.1%} " for each in shares) + f"{1e3 * limit:>11.1f}")
        if row["bytes"] == 25 * MIB:
            goals.append(harness.at_least(f"all_reduce {label}: wire / ours", 0.95, shares[0]))
    return goals


def show_checks(by_default: dict[str, Any], always: dict[str, Any]) -> None:
    """Prints what comparing every call costs: ours in both runs, and raw mpi4py's, which had to do the same in both."""
    print(f"\n{'checks, us':<20}{'default':>12}{'always':>12}{'cost':>10}{'raw then':>12}{'raw now':>10}")
    for before, after in zip(by_default["rows"], always["rows"], strict=True):
        label = f"{before['collective']} {collectives.size(before['bytes'])}"
        ours, raw = ([statistics.median(run["us"][key]) for run in (before, after)] for key in ("ours", "raw"))
        print(f"{label:<20}{ours[0]:>12.1f}{ours[1]:>12.1f}{ours[1] - ours[0]:>10.1f}{raw[0]:>12.1f}{raw[1]:>10.1f}")


def main() -> None:
    parser = harness.parser(__doc__, rounds=7, json_file="two_hosts.json")
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc writes it (default: 1gbit)")
    args = parser.parse_args()
    asked = {"rounds": args.rounds, "address": ADDRESS, "wire": True, "timeout": 60.0}
    with hosts(args.rate) as names:
        by_default = collectives.run({**asked, "rows": [*SMALL, *LARGE]}, start(names))
        always = None
        if "check" in inspect.signature(package.init).parameters:
            always = collectives.run({**asked, "rows": SMALL, "check": "always"}, start(names))
    reached = show(by_default, args.rate)
    if always is not None:
        show_checks({"rows": by_default["rows"][: len(SMALL)]}, always)
    harness.show_goals(reached)
    found = {"rate": args.rate, "default": by_default, "always": always, "goals": [vars(goal) for goal in reached]}
    harness.write(args.json, "two_hosts", hosts="two network namespaces", **found)


if __name__ == "__main__":
    main()
