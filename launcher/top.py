"""`ddp-top`: shows a running ddp-launch, one line per rank; on a terminal it updates the lines every second."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from collectives.errors import align_columns
from launcher.console.status import running_jobs
from launcher.console.terminal import one_line
from launcher.linux import format_bytes

# Interval at which the table is shown again (s).
_INTERVAL = 1.0
_DESCRIPTION = """\
Shows a running job of ddp-launch, one line per rank: steps, samples and reduced bytes per second, loss, the fractions
of time in which the rank waits for communication and in which others wait for it, memory, the last collective. On a
terminal the lines are updated every second until the job ends, or Ctrl-C; otherwise they are printed once."""
# The figures of `Status.ranks` that are shown, in this order.
_COLUMNS = (
    "rank",
    "step",
    "step/s",
    "samples/s",
    "loss",
    "exposed/s",
    "waited/s",
    "reduced_bytes/s",
    "rss",
    "device_bytes",
    "restarts",
    "pid",
    "host",
    "call",
    "call_state",
    "where",
)


def describe_job(job: dict[str, Any]) -> str:
    """The job's command, and a table of its ranks."""
    rows = [_COLUMNS, *([_cell(name, rank.get(name)) for name in _COLUMNS] for rank in job["ranks"])]
    return "\n".join([f"ddp-launch {job['pid']}: {one_line(job['target'])}", *align_columns(rows)])


def _cell(name: str, figure: Any) -> str:
    if figure is None:
        return "-"
    if "bytes" in name or name == "rss":
        return format_bytes(int(figure))
    return f"{figure:.4g}" if isinstance(figure, float) else one_line(str(figure))


def _why_no_job(pid: str | None) -> str:
    """The sentence for the user if not exactly one job matches. pid: the argument"""
    running = ", ".join(str(job["pid"]) for job in running_jobs())
    if not running:
        return "no ddp-launch of yours is running"
    if pid is None:
        return f"several ddp-launch of yours are running, name one: {running}"
    return f"{pid} is no running ddp-launch of yours; these are: {running}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns: its exit code"""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback.
    parser = argparse.ArgumentParser("ddp-top", description=_DESCRIPTION)
    parser.add_argument("pid", nargs="?", help="pid of ddp-launch; needed if several of yours are running")
    pid = parser.parse_args(argv).pid
    jobs = running_jobs() if pid is None else running_jobs(pid)
    if len(jobs) != 1:
        print(f"ddp-top: {_why_no_job(pid)}", file=sys.stderr)
        return 2
    terminal = sys.stdout.isatty()
    while jobs:
        print("\x1b[H\x1b[J" * terminal + describe_job(jobs[0]), flush=True)
        if not terminal:
            return 0
        time.sleep(_INTERVAL)
        jobs = running_jobs(jobs[0]["pid"])
    print("the job has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
