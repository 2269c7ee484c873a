"""One rank of a job that `ddp-bench` has started: it measures, and rank 0 leaves the outcome in a file."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

from collectives import BackendError, init, run_threads, world
from launcher.bench.rank import run
from launcher.bench.record import Outcome
from launcher.bench.settings import Settings
from launcher.job import UsageError

_DAY = 86_400.0  # s; the time limit of a whole run between threads


def main(argv: Sequence[str]) -> None:
    """argv: settings, backend, number of ranks, 1 for a progress bar, and the path that rank 0 writes to."""
    # A rival's call may block where Python cannot be interrupted; nothing is lost with a rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    text, backend, ranks, bar, path = argv
    try:
        outcome = join(Settings.decode(text), backend, int(ranks), bar=bar == "1")
        said = outcome.encode()
    except UsageError as error:
        said = {"refused": str(error)}
    place = world.promised()
    if place is None or place.rank == 0:
        with open(path, "w") as file:
            json.dump(said, file)


def join(settings: Settings, backend: str, ranks: int, *, bar: bool) -> Outcome:
    """Measures with the other ranks, or with `ranks` threads; what was found.

    Raises: UsageError, on every rank, if the backend or a contestant is not to be had.
    """
    if backend == "threads":
        return run_threads(lambda comm: run(comm, settings, bar=bar), ranks, timeout=_DAY)[0]
    try:
        comm = init(backend)
    except BackendError as error:
        raise UsageError(str(error)) from None
    return run(comm, settings, bar=bar)


if __name__ == "__main__":
    main(sys.argv[1:])
