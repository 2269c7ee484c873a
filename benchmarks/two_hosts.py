"""all_reduce over a wire: two hosts of one rank each, joined by a cable of a known rate. Needs Linux's root, and MPICH.

    python -m benchmarks.two_hosts [--rate 1gbit] [--json FILE]

The hosts are network namespaces of this machine (tests/cluster/hosts.sh, which says what may be lacking), the rate is
tc's. Two ranks that reduce N bytes must each send N: half of x to be added, and half of the result. So the wire's
limit is N / (rate * 1448 / 1514): tc counts frames of 1514 bytes, 1448 of which are data (Ethernet, IPv4, TCP with
timestamps). A bare TCP connection that sends N bytes each way at once takes 0.1 % longer at 25 MiB, 2 % at 100 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import harness
from benchmarks.collectives import MIB, bench
from launcher.engines.mpiexec import MPICH, find_mpiexec_for
from launcher.linux import format_bytes

SCRIPT = harness.ROOT / "tests" / "cluster" / "hosts.sh"
ADDRESS = "10.0.0.1"  # of the first host
READY = 30.0  # s
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that may run on two hosts."""
    parser.add_argument("--rate", default="1gbit", help="rate of the cable, as tc writes it (default: 1gbit)")
    parser.add_argument("--here", action="store_true", help="run on this machine, without two hosts and a cable")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each turn (default: 3)")


def wanted(stack: contextlib.ExitStack, args: argparse.Namespace) -> list[str] | None:
    """The hosts that these options ask for, for as long as the stack lasts; None: this machine."""
    return None if args.here else stack.enter_context(hosts(args.rate))


def describe_network(args: argparse.Namespace) -> dict[str, Any]:
    """For the results: on which hosts, at which rate."""
    return {"hosts": "one" if args.here else "two network namespaces", "rate": None if args.here else args.rate}


@contextlib.contextmanager
def hosts(rate: str, *folder: str) -> Iterator[list[str]]:
    """The names of two hosts, for as long as the context lasts.

    rate: of the cable, "" for one without a limit; folder: given, each host has an sshd, for the command `folder`/ssh

    Raises: SystemExit with what this machine lacks.
    """
    command = [str(SCRIPT), "up", rate, *folder]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], READY)
        words = process.stdout.readline().split() if ready else []
        if words[:1] != ["ready"]:
            raise SystemExit(" ".join(words) or "the hosts were not ready in time")
        yield words[1:]
    finally:
        process.stdin.close()  # the hosts end with the script
        try:
            process.wait(READY)
        finally:
            process.kill()
            process.wait()


def set_cable(name: str, state: str) -> None:
    """Pulls the cable out of a host, "down", or puts it back, "up"."""
    command = ["nsenter", "--target", name.removeprefix("host-"), "--net", "ip", "link", "set", "eth0", state]
    subprocess.run(command, check=True)


def start(names: list[str]) -> list[str]:
    """The command that starts one Python on each host, the first on the first."""
    mpiexec, family = find_mpiexec_for("auto")
    if family != MPICH:
        raise SystemExit("two hosts on one machine need MPICH: only its mpiexec is known to reach them")
    # The hosts share one kernel: neither the MPI nor gloo may find a way from process to process beside the wire.
    options = ["-launcher", "ssh", "-launcher-exec", str(SCRIPT), "-localhost", ADDRESS, "-hosts", ",".join(names)]
    settings = {"UCX_TLS": "tcp,self", "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": ADDRESS, "OMP_NUM_THREADS": "1"}
    environ = [word for name, value in settings.items() for word in ("-genv", name, value)]
    return [str(SCRIPT), names[0], mpiexec, *options, "-ppn", "1", *environ, sys.executable]


def by_the_rate(nbytes: int, rate: str) -> float:
    """Seconds that `nbytes` take by the rate alone, in full frames."""
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return nbytes * 8 * 1514 / 1448 / (float(number) * UNITS[rate[len(number) :]])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rate", default="1gbit", help="rate of the cable, as tc writes it (default: 1gbit)")
    args = parser.parse_args()
    rows = []
    goals = []
    with hosts(args.rate) as names:
        for nbytes in (25 * MIB, 100 * MIB):
            us = bench("all_reduce", nbytes, ["--place", "in"], start(names))
            limit = by_the_rate(nbytes, args.rate)
            ms = {key: value / 1e3 for key, value in harness.medians(us).items()}
            shares = {key: 1e3 * limit / value for key, value in ms.items()}
            shown = ", ".join(f"{key} {value:.1f} ({shares[key]:.1%})" for key, value in ms.items())
            print(f"all_reduce {format_bytes(nbytes)}: {1e3 * limit:.1f} ms by the rate; {shown}", flush=True)
            rows.append({"collective": "all_reduce", "bytes": nbytes, "limit_us": 1e6 * limit, "us": us})
            if nbytes == 25 * MIB:
                goals.append(harness.at_least("all_reduce 25 MiB: the wire / ours", 0.95, shares["ours"]))
    harness.write(args.json, "two_hosts", goals, hosts="two network namespaces", rate=args.rate, rows=rows)


if __name__ == "__main__":
    main()
