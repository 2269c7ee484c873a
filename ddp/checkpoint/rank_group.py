"""Runs work on all ranks, so that it succeeds on all of them or raises on all of them.

The error message names the first rank that failed. `describing_os_errors` adds the file and the system's reason."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout, name_ranks
from collectives.monitored_section import MonitoredSection
from ddp.errors import CheckpointError

T = TypeVar("T")

# How long (s) a rank may be without progress, of its disk for example, before the call fails on all ranks.
PATIENCE = 1800.0

# Errors that do not mean that the file is damaged: another process could read it, or this process could later.
_TRANSIENT = {
    errno.EINTR,
    errno.EAGAIN,
    errno.ESTALE,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ETIMEDOUT,
}


@contextlib.contextmanager
def describing_os_errors(what: str, path: str) -> Iterator[None]:
    """Turns an OSError of the block into a CheckpointError, such as "writing runs/x: No space left on device".

    what: the beginning of the message
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} {path}: {reason(error)}") from error


def reason(error: OSError) -> str:
    """The system's message for the error, without a path."""
    # The FileNotFoundError of fsspec has no number.
    number = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno
    return os.strerror(number) if number else str(error)


def is_transient(error: BaseException | None) -> bool:
    """Whether a file may be undamaged, although reading it raised `error`."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


class RankGroup:
    """Runs functions on all ranks, and makes the outcome known to all. Collective; one thread at a time may call it.

    comm: the ranks' communicator, which is duplicated; None: this process alone
    A disk may take longer than the time limit of a collective, so ranks work in a `MonitoredSection`.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.rank = 0
        self.size = 1
        self._comm: Communicator | None = None
        if comm is not None and comm.size > 1:
            self.rank = comm.rank
            self.size = comm.size
            self._comm = comm.duplicate()
        self._broken: str | None = None  # why no more calls can be made
        self._section: MonitoredSection | None = None

    def close(self) -> None:
        """Closes the duplicate of the communicator. Later calls of `run_on_all_ranks` raise."""
        self._broken = "the Store was closed: make another one"
        if self._comm is not None:
            self._comm.close()

    def progress(self) -> None:
        """Restarts the time of `PATIENCE` on this rank. A function that may take longer calls this repeatedly."""
        if self._section is not None:
            self._section.progress()

    def run_on_all_ranks(self, failed: str, fn: Callable[[], T], reraise: bool = False) -> list[T]:
        """Calls `fn` on every rank and returns the results of all ranks, in rank order. Results are pickled.

        failed: the beginning of the error message; reraise: True: a rank whose `fn` raised raises that error instead
        Raises: CheckpointError on every rank if `fn` raised on one, or if a rank made no progress for `PATIENCE`
        seconds or was stopped for longer than the communicator's time limit. After such a timeout, and after `close`,
        every later call raises it, too. PeerLeft or a related error if a rank has ended.
        """
        if self._broken is not None:
            raise CheckpointError(f"{failed}: {self._broken}")
        cause: Exception | None = None

        def attempt() -> tuple[Any, str]:
            nonlocal cause
            try:
                return fn(), ""
            except Exception as error:
                cause = error
                return None, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

        results = [attempt()] if self._comm is None else self._gather(self._comm, failed, attempt)
        if cause is not None and reraise:
            raise cause
        failures = [rank for rank, (_, text) in enumerate(results) if text]
        if failures:
            first, *others = failures
            more = f"; {name_ranks(others)} too" if others else ""
            raise CheckpointError(f"{failed}: rank {first}: {results[first][1]}{more}") from cause
        return [value for value, _ in results]

    def _gather(self, comm: Communicator, failed: str, attempt: Callable[[], tuple[Any, str]]) -> list[tuple[Any, str]]:
        self._section = section = MonitoredSection(comm, PATIENCE)
        try:
            with section:
                result = attempt()
        except CollectiveTimeout as error:
            # The collective calls of the ranks would no longer match each other.
            self._broken = f"in an earlier save, {error}"
            raise CheckpointError(f"{failed}: {error}") from error
        if section.failed:
            raise CheckpointError(f"{failed}: rank {section.failed[0]} was interrupted")
        return comm.all_gather_object(result)
