"""`ddp-doctor`: looks at running ranks from outside, without their help. Who hangs cannot be asked."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from collectives.errors import RecordError
from collectives.flight.reader import read
from collectives.flight.report import FlightRecord, table

_LAST = 10


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, 1 if a process could not be read, 2 for wrong use."""
    args = _parser().parse_args(argv)
    try:
        return _calls(args.pids, args.last, args.json)
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-doctor", description="Looks at running ranks from outside, without their help."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    calls = commands.add_parser(
        "calls",
        help="what ranks did last",
        description="Prints the last collectives of running processes and where their Python stands; they may hang.",
        epilog="Exit code: 0; 1 if a process could not be read; 2 for wrong use.",
    )
    calls.add_argument("pids", nargs="+", type=_positive, metavar="PID", help="process of a rank, on this machine")
    calls.add_argument("--last", type=_positive, default=_LAST, metavar="N", help=f"calls of each rank ({_LAST})")
    calls.add_argument("--json", action="store_true", help="print JSON; its times are of the monotonic clock, in ns")
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _calls(pids: Sequence[int], last: int, as_json: bool) -> int:
    records: list[FlightRecord] = []
    errors: dict[int, str] = {}
    for pid in dict.fromkeys(pids):
        try:
            records.append(read(pid))
        except RecordError as error:
            errors[pid] = str(error)
    now = time.monotonic_ns()
    if as_json:
        processes = [_plain(record, last) for record in records]
        print(json.dumps({"now": now, "processes": processes, "errors": errors}, indent=1))
    elif records:
        print(table(records, now, last))
    sys.stdout.flush()
    for text in errors.values():
        print(f"ddp-doctor: {text}", file=sys.stderr)
    return 1 if errors else 0


def _plain(record: FlightRecord, last: int) -> dict[str, object]:
    return {
        **record._asdict(),
        "calls": [call._asdict() for call in record.calls[-last:]],
        "position": record.position and record.position._asdict(),
    }


if __name__ == "__main__":
    sys.exit(main())
