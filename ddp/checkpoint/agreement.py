"""All ranks or none: each does its part, and then all know whether every rank's succeeded.

What failed is said in one sentence: the rank, the file, the system's reason, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout
from collectives.heartbeat import Heartbeat
from ddp.errors import CheckpointError

T = TypeVar("T")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What a network or a disk may get over.
_PASSING = (errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.EIO)
# What says nothing of the file: that another process, or this one later, could read it.
_ELSEWHERE = (*_PASSING[:-1], errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)
_ADVICE = {
    errno.ENOSPC: "free some room there, or keep fewer checkpoints",
    errno.EDQUOT: "free some room there, or keep fewer checkpoints",
    errno.EROFS: "give a folder that can be written",
    errno.EACCES: "give a folder that can be written",
    errno.EPERM: "give a folder that can be written",
    errno.ENOENT: "was the folder removed?",
    errno.ENOTDIR: "a folder is needed there",
    errno.EIO: "the disk is failing: look at the system's log, and save elsewhere",
    errno.ESTALE: "the file server has changed under the folder: mount it again",
    errno.EEXIST: "does something else write there?",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EFBIG: "the file system takes no files of that size",
}


class LocalFailure(Exception):
    """Why a rank could not do its part, in words."""


class RankFailure(NamedTuple):
    """Which rank could not do its part, and why."""

    rank: int
    text: str


@contextlib.contextmanager
def describing_os_errors(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts into words which file the system refused something in the block: `with doing("writing", path):`"""
    try:
        yield
    except OSError as error:
        raise LocalFailure(describe_os_error(what, os.fspath(path), error)) from error


def describe_os_error(what: str, path: str, error: OSError) -> str:
    """`writing runs/x: No space left on device, 4,096 bytes are left (free some room there, ...)`"""
    number = error.errno or 0
    advice = f" ({_ADVICE[number]})" if number in _ADVICE else ""
    return f"{what} {path}: {reason(error)}{_free_space(path) if number in _NO_ROOM else ''}{advice}"


def reason(error: OSError) -> str:
    """The system's words for it, without a path."""
    return os.strerror(error.errno) if error.errno else str(error)


def is_transient(error: BaseException | None) -> bool:
    """Whether a file that could not be read may still be as it was written."""
    return isinstance(error, OSError) and error.errno in _ELSEWHERE


def _free_space(path: str) -> str:
    try:
        stat = os.statvfs(os.path.dirname(path))
    except OSError:
        return ""
    return f", {stat.f_bavail * stat.f_frsize:,} bytes are left"


def retry_once(work: Callable[[], T]) -> T:
    """What `work` returns, at the second attempt where the first failed by what may pass. It begins anew each time."""
    try:
        return work()
    except OSError as error:
        if error.errno not in _PASSING:
            raise
        return work()


def failure_message(failed: str, failures: Sequence[RankFailure]) -> str:
    """What failed, on which ranks, and why. failures: at least one"""
    first, *rest = failures
    more = f"; rank{'s' if len(rest) > 1 else ''} {', '.join(str(each.rank) for each in rest)} too" if rest else ""
    return f"{failed}: rank {first.rank}: {first.text}{more}"


PATIENCE = 1800.0  # s without a byte, or an answer from the disk, after which a rank is given up


class RankAgreement:
    """One rank's end of it, on a communicator of its own. Collective, from any one thread.

    A disk may take longer than a collective may, so ranks work under heartbeats (`collectives.heartbeat`).
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._comm = comm.duplicate()
        self._broken: str | None = None
        self._beat = Heartbeat(self._comm)

    def close(self) -> None:
        """Takes no further calls."""
        self._comm.close()

    def progress(self) -> None:
        """Says, from within `work`, that it gets on."""
        self._beat.progress()

    def run(self, failed: str, work: Callable[[], T]) -> list[T]:
        """What `work` returned on each rank, on all of them; what is pickled, as ranks of one job do.

        failed: how the error begins
        Raises: CheckpointError on every rank if `work` raised on one; PeerLeft and its kin if a rank is gone.
        """
        if self._broken is not None:
            raise CheckpointError(f"{failed}: {self._broken}")
        mine: T | RankFailure
        cause: Exception | None = None
        self._beat = Heartbeat(self._comm, PATIENCE)
        try:
            with self._beat:
                try:
                    mine = work()
                except Exception as error:
                    cause = error
                    text = str(error) if isinstance(error, LocalFailure) else f"{type(error).__name__}: {error}"
                    mine = RankFailure(self.rank, text)
        except CollectiveTimeout as error:  # ranks will not meet again
            self._broken = f"in an earlier save, {error}"
            raise CheckpointError(f"{failed}: {error}") from error
        if self._beat.failed:
            raise CheckpointError(f"{failed}: rank {self._beat.failed[0]} was interrupted")
        results: list[T | RankFailure] = self._comm.all_gather_object(mine)
        failures = [each for each in results if isinstance(each, RankFailure)]
        if failures:
            raise CheckpointError(failure_message(failed, failures)) from cause
        return [each for each in results if not isinstance(each, RankFailure)]


def gather_or_raise(comm: Communicator, what: str, work: Callable[[], T]) -> list[T]:
    """What `work`, which takes no longer than a collective may, returned on each rank. Collective of several ranks.

    Raises: on every rank, what `work` raised there; on the others CheckpointError, with the words of the first.
    """
    mine: T | RankFailure
    mistake: Exception | None = None
    try:
        mine = work()
    except Exception as error:
        mistake = error
        mine = RankFailure(comm.rank, f"{type(error).__name__}: {error}")
    results: list[T | RankFailure] = [mine] if comm.size == 1 else comm.all_gather_object(mine)
    if mistake is not None:
        raise mistake
    for each in results:
        if isinstance(each, RankFailure):
            raise CheckpointError(f"rank {each.rank} could not {what}: {each.text}")
    return [each for each in results if not isinstance(each, RankFailure)]
