"""`ddp-bench` (`python -m launcher.bench`): starts ranks that run this module. If a launcher started it, it is a rank.

With the backends `threads` and `single` it starts no other process, and measures in this one.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from collectives.world import World, world_from_env
from launcher.bench.settings import ALONE, Settings, parse, parser
from launcher.errors import UsageError
from launcher.job import Job

# Seconds from SIGTERM to SIGKILL: ranks of a benchmark have nothing to save.
_GRACE = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    # Ctrl-C ends this process at once, without a traceback: a baseline's call may block where Python handles no signal.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = sys.argv[1:] if argv is None else argv
    started = world_from_env()
    try:
        if "--help" in argv or "-h" in argv:
            print(parser().format_help(), end="")
            return 0
        settings = parse(argv)
        if started is None and settings.backend not in ALONE:
            from launcher.supervisor.supervisor import launch

            # Without a prefix: rank 0 alone prints.
            job = Job(module="launcher.bench", args=tuple(argv), n=settings.ranks or 2, grace=_GRACE, prefix=False)
            return launch(job)
        return _measure(settings, started)
    except UsageError as error:
        if started is None or started.rank == 0:
            print(f"ddp-bench: {error}", file=sys.stderr)
        return 2


def _measure(settings: Settings, started: World | None) -> int:
    """Measures together with the other ranks of the job. Returns: the exit code"""
    if started is not None and settings.ranks not in (None, started.size):
        raise UsageError(f"-n {settings.ranks} was requested, but {started.engine} has started {started.size} ranks")
    if started is not None and started.size > 1 and settings.backend in ALONE:
        raise UsageError(f"backend {settings.backend} starts its own ranks: start ddp-bench by itself")
    from launcher.bench import report, runner

    outcome = runner.join(settings)
    if started is not None and started.rank != 0:
        return 0
    if settings.json is not None:
        report.save(settings.json, settings, outcome)
    if settings.plot is not None:
        report.save_plot(settings.plot, outcome)
    if outcome.wrong:
        print(f"ddp-bench: {outcome.wrong} elements were wrong", file=sys.stderr)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
