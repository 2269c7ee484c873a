"""All ranks or none: each rank does its part, and then all know whether every rank's succeeded.

An error is one sentence: the rank, the file and the system's reason."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout
from collectives.monitored_section import MonitoredSection
from ddp.errors import CheckpointError

T = TypeVar("T")

PATIENCE = 1800.0  # s without a byte, or an answer from the disk, after which a rank is given up

# What says nothing of the file: another process, or this one later, could read it.
_TRANSIENT = {errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}
_TRANSIENT |= {errno.ENOMEM, errno.ETIMEDOUT}


@contextlib.contextmanager
def describing_os_errors(what: str, path: str) -> Iterator[None]:
    """Raises CheckpointError for an OSError of the block: "writing runs/x: No space left". what: "writing" """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} {path}: {reason(error)}") from error


def reason(error: OSError) -> str:
    """The system's words for it, without a path."""
    number = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno  # fsspec gives none
    return os.strerror(number) if number else str(error)


def is_transient(error: BaseException | None) -> bool:
    """Whether a file that could not be read may still be as it was written."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


class Agreement:
    """One rank's end of the agreement. Collective, from any one thread.

    comm: of the ranks, of which a duplicate is made; None: this process alone
    A disk may take longer than a collective may, so ranks work in a `MonitoredSection`.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._comm = None if comm is None or comm.size == 1 else comm.duplicate()
        self._broken: str | None = None
        self._beat: MonitoredSection | None = None

    def close(self) -> None:
        """Takes no further calls."""
        if self._comm is not None:
            self._comm.close()

    def progress(self) -> None:
        """Says, from within `work`, that this rank gets on."""
        if self._beat is not None:
            self._beat.progress()

    def run(self, failed: str, work: Callable[[], T], reraise: bool = False) -> list[T]:
        """What `work` returned on each rank, on all of them; results are pickled, as ranks of one job do.

        failed: how the error begins; reraise: a rank whose `work` raised raises the same again
        Raises: CheckpointError on every rank if `work` raised on one; PeerLeft and its kin if a rank is gone.
        """
        if self._broken is not None:
            raise CheckpointError(f"{failed}: {self._broken}")
        cause: Exception | None = None

        def attempt() -> tuple[Any, str]:
            nonlocal cause
            try:
                return work(), ""
            except Exception as error:
                cause = error
                return None, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

        results = [attempt()] if self._comm is None else self._gather(self._comm, failed, attempt)
        if cause is not None and reraise:
            raise cause
        failures = [rank for rank, (_, text) in enumerate(results) if text]
        if failures:
            first, *rest = failures
            more = f"; rank{'s' if len(rest) > 1 else ''} {', '.join(map(str, rest))} too" if rest else ""
            raise CheckpointError(f"{failed}: rank {first}: {results[first][1]}{more}") from cause
        return [value for value, _ in results]

    def _gather(self, comm: Communicator, failed: str, attempt: Callable[[], tuple[Any, str]]) -> list[tuple[Any, str]]:
        self._beat = beat = MonitoredSection(comm, PATIENCE)
        try:
            with beat:
                mine = attempt()
        except CollectiveTimeout as error:  # ranks will not meet again
            self._broken = f"in an earlier save, {error}"
            raise CheckpointError(f"{failed}: {error}") from error
        if beat.failed:
            raise CheckpointError(f"{failed}: rank {beat.failed[0]} was interrupted")
        return comm.all_gather_object(mine)
