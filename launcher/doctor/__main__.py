"""`ddp-doctor`, and `python -m launcher.doctor` for places where the command is not on PATH."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

_LAST = 10
_USAGE = """ddp-doctor [--hosts A,B | --hostfile FILE] [--json]
       ddp-doctor calls PID...
       ddp-doctor sweep"""
_DESCRIPTION = """\
Says whether this machine can train, what is wrong, and what fixes it: Python, threads, MPI, memory, limits, GPUs,
two ranks that try every collective, and how fast they are. With --hosts or --hostfile the other machines, too.
"""
_EPILOG = "Exit code: 0; 1 if training would fail, or a process could not be read; 2 for wrong use."


def run(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments request; returns the exit code."""
    from launcher.errors import UsageError
    from launcher.network import parse_hosts, read_hostfile

    args = _parser().parse_args(argv)
    if args.command == "calls":
        return calls(args.pids, args.last, args.json)
    if args.command == "sweep":
        from launcher.doctor.machine import sweep

        return sweep()
    try:
        machines = parse_hosts(args.hosts) if args.hosts else read_hostfile(args.hostfile) if args.hostfile else ()
    except UsageError as error:
        print(f"ddp-doctor: {error}", file=sys.stderr)
        return 2
    from launcher.doctor.checkup import checkup

    return checkup(machines, args.json)


def calls(pids: Sequence[int], last: int, as_json: bool) -> int:
    """Prints the `last` calls of each process, read from outside; returns 1 if one could not be read, else 0."""
    from collectives.errors import RecordError
    from collectives.flight.reader import read, table

    records, errors = [], {}
    for pid in dict.fromkeys(pids):
        try:
            records.append(read(pid))
        except RecordError as error:
            errors[pid] = str(error)
    now = time.monotonic_ns()
    if as_json:
        plain = [
            {
                **record._asdict(),
                "calls": [call._asdict() for call in record.calls[-last:]],
                "position": record.position and record.position._asdict(),
            }
            for record in records
        ]
        print(json.dumps({"now": now, "processes": plain, "errors": errors}, indent=1))
    elif records:
        print(table(records, now, last))
    sys.stdout.flush()
    for text in errors.values():
        print(f"ddp-doctor: {text}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddp-doctor", usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="machines that are to train together, as ddp-launch takes them")
    where.add_argument("--hostfile", metavar="FILE", help="the same, one machine a line")
    parser.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(dest="command", title="other commands", metavar="COMMAND", prog="ddp-doctor")
    calls = commands.add_parser(
        "calls",
        help="what ranks did last",
        description="Prints the last collectives of running processes and where their Python stands; they may hang.",
        epilog="Exit code: 0; 1 if a process could not be read; 2 for wrong use.",
    )
    calls.add_argument("pids", nargs="+", type=_positive, metavar="PID", help="process of a rank, on this machine")
    calls.add_argument("--last", type=_positive, default=_LAST, metavar="N", help=f"calls of each rank ({_LAST})")
    calls.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,  # or `ddp-doctor --json calls` would lose it
        help="print JSON; its times are of the monotonic clock, in ns",
    )
    commands.add_parser(
        "sweep",
        help="remove what killed MPI jobs left in /dev/shm",
        description="Removes files in /dev/shm that MPI jobs of yours left when they were killed, and that no process "
        "holds which can be seen from here. Not for containers that share /dev/shm with others (--ipc=host).",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    # What a check has started ends with this process, which must not die without a word to it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return run(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
