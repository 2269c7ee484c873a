"""`ddp-doctor`, and `python -m launcher.doctor` for places where the command is not on PATH."""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Sequence

from launcher.arguments import ArgumentParser, nearest, positive, value
from launcher.errors import UsageError
from launcher.network import parse_hosts, read_hostfile

# Default of --last: the number of calls that `calls` prints for each process.
_LAST = 10
_PID = value("a positive whole number", positive)
#: The options of each command; "" is the check of machines.
_OPTIONS: dict[str, tuple[str, ...]] = {"": ("hosts", "hostfile", "json"), "calls": ("last",), "sweep": ()}
_USAGE = """ddp-doctor [--hosts HOSTS | --hostfile FILE] [--json]
       ddp-doctor calls PID... [--last N]
       ddp-doctor sweep"""
_DESCRIPTION = """\
Says whether this machine can train, what is wrong, and what fixes it. Checks Python, threads, MPI,
memory, limits and GPUs; then starts two ranks, which try every collective and time all_reduce. With
--hosts or --hostfile it also starts one rank on each of these hosts.

calls   prints the last collectives of each process, and where its Python code is. The processes may
        hang.
sweep   removes files in /dev/shm that your MPI jobs left when they were killed, and that no process
        uses. It cannot see processes of other containers: do not use it if containers share
        /dev/shm (--ipc=host).
"""
_EPILOG = """\
Defaults stand in parentheses at the end of a line.

Exit code: 0; 1 if training would fail, a process could not be read, or sweep could not remove all;
2 for wrong use; 130 after Ctrl-C."""


def run(argv: Sequence[str]) -> int:
    """Runs the command that the arguments name; returns the exit code. Raises: UsageError"""
    args = _parser().parse(argv)
    command, *words = args.get("words") or [""]
    if "help" in args:
        print(_parser().format_help(), end="")
        return 0
    if refused := sorted(args.keys() - {"words", *_OPTIONS.get(command, args)}):
        raise UsageError(f"{f'ddp-doctor {command}'.rstrip()} takes no --{refused[0]}")
    if command == "calls":
        if not words:
            raise UsageError("no process named: ddp-doctor calls PID...")
        try:
            pids = [*map(_PID, words)]
        except ArgumentTypeError as error:
            raise UsageError(f"PID {error}") from None
        return calls(pids, args.get("last", _LAST))
    if command == "sweep" and not words:
        from launcher.doctor.machine import sweep

        return sweep()
    if command:
        raise UsageError(f"unknown command {' '.join([command, *words])}{nearest(command, ('calls', 'sweep'))}")
    from launcher.doctor.checkup import checkup

    machines = read_hostfile(args["hostfile"]) if "hostfile" in args else args.get("hosts", ())
    return checkup(machines, "json" in args)


def calls(pids: Sequence[int], last: int) -> int:
    """Prints the last calls of each process, at most `last`. Returns: 1 if a process could not be read, else 0"""
    from collectives.errors import RecordError
    from collectives.flight.reader import calls_table, read

    records = []
    errors = []
    for pid in dict.fromkeys(pids):
        try:
            records.append(read(pid))
        except RecordError as error:
            errors.append(str(error))
    if records:
        print(calls_table(records, time.monotonic_ns(), last), flush=True)
    for text in errors:
        print(f"ddp-doctor: {text}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("ddp-doctor", usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("words", nargs="*", help=SUPPRESS)
    add_machines = parser.add_mutually_exclusive_group().add_argument
    machines = "hosts that are to train together, as in ddp-launch: a:4,b:4"
    add_machines("--hosts", metavar="HOSTS", type=parse_hosts, help=machines)
    add_machines("--hostfile", metavar="FILE", help="the same from a file, one host per line")
    parser.add_argument("--last", metavar="N", type=_PID, help=f"calls: number of last collectives to print ({_LAST})")
    parser.add_argument("--json", action="store_true", help="print the result of the checks as JSON")
    parser.add_argument("--help", "-h", action="store_true", help="print this help")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    # SIGTERM raises SystemExit, so that a check ends the processes that it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"ddp-doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the output is a pipe whose reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
