"""`ddp-bench`, and `python -m launcher.bench`: starts the ranks, or is one of those that a launcher has started."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Sequence

from collectives import world
from launcher.bench import report
from launcher.bench.report import Outcome
from launcher.bench.settings import ALONE, Settings, available_memory, check_environment, help_text, parse
from launcher.errors import UsageError
from launcher.job import Job

_GRACE = 1.0  # s; ranks that are asked to end have nothing to save


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    # Nothing here is worth keeping: Ctrl-C ends this process at once, and without a traceback.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = sys.argv[1:] if argv is None else argv
    place = world.promised()
    try:
        if "--help" in argv or "-h" in argv:
            text = help_text()
        elif "--version" in argv:
            from collectives.version import __version__

            text = f"ddp-bench {__version__}\n"
        else:
            settings = parse(argv)
            return _start(settings) if place is None else _take_part(settings, place)
    except UsageError as error:
        if place is None or place.rank == 0:
            print(f"ddp-bench: {error}", file=sys.stderr)
        return 2
    if place is None or place.rank == 0:
        print(text, end="")
    return 0


def _start(settings: Settings) -> int:
    """Starts a job for each backend, one after the other."""
    from launcher.supervisor.supervisor import launch

    check_environment(settings, available_memory())
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        for backend in settings.backend:
            result = os.path.join(folder, backend)
            n = settings.world(backend)
            job = Job(
                module="launcher.bench.worker",
                args=(settings.encode(), backend, str(n), result),
                n=1 if backend in ALONE else n,
                grace=_GRACE,
                prefix=False,  # rank 0 alone has something to say
            )
            if (code := launch(job)) != 0:
                return code
            with open(result, "rb") as file:
                outcome = pickle.load(file)
            if isinstance(outcome, UsageError):
                raise outcome
            outcomes.append(outcome)
    return _finish(settings, outcomes)


def _take_part(settings: Settings, place: world.World) -> int:
    """Measures on the ranks that are there; this is one of them."""
    if settings.ranks not in (None, place.size):
        raise UsageError(f"-n {settings.ranks} was asked for, but {place.engine} has started {place.size} ranks")
    if len(settings.backend) > 1:
        raise UsageError("under a launcher a job has one backend: name one, or start ddp-bench by itself")
    settings = dataclasses.replace(settings, ranks=place.size)
    if "threads" in settings.backend and place.size > 1:
        raise UsageError("backend threads makes ranks of its own: start ddp-bench by itself")
    check_environment(settings, None)
    from launcher.bench.worker import join

    outcome = join(settings, settings.backend[0], place.size)
    if place.rank == 0:
        return _finish(settings, [outcome])
    return 1 if outcome.wrong else 0


def _finish(settings: Settings, outcomes: Sequence[Outcome]) -> int:
    """Writes what is to be kept, and says on stderr what went wrong."""
    now = datetime.datetime.now(datetime.timezone.utc)
    if settings.json is not None:
        report.save(settings.json, report.report(settings, outcomes, now))
    if settings.plot is not None:
        ranks = " and ".join(dict.fromkeys(str(outcome.ranks) for outcome in outcomes))
        if not report.save_plot(settings.plot, outcomes, f"{ranks} ranks, {report.cpu()}, {now:%Y-%m-%d}"):
            print("ddp-bench: nothing to plot: no collective that was measured has a size", file=sys.stderr)
    if wrong := sum(outcome.wrong for outcome in outcomes):
        print(f"ddp-bench: {wrong} elements were wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
