"""What a save has failed by, in one sentence: the rank, the file, the system's reason, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

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


class Failed(Exception):
    """Why a rank could not do its part, in words."""


class Trouble(NamedTuple):
    """Which rank could not do its part, and why."""

    rank: int
    text: str


@contextlib.contextmanager
def doing(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts into words which file the system refused something in the block: `with doing("writing", path):`"""
    try:
        yield
    except OSError as error:
        raise Failed(words(what, os.fspath(path), error)) from error


def words(what: str, path: str, error: OSError) -> str:
    """`writing runs/x: No space left on device, 4,096 bytes are left (free some room there, ...)`"""
    number = error.errno or 0
    advice = f" ({_ADVICE[number]})" if number in _ADVICE else ""
    return f"{what} {path}: {reason(error)}{_room(path) if number in _NO_ROOM else ''}{advice}"


def reason(error: OSError) -> str:
    """The system's words for it, without a path."""
    return os.strerror(error.errno) if error.errno else str(error)


def may_be_whole(error: BaseException | None) -> bool:
    """Whether a file that could not be read may still be as it was written."""
    return isinstance(error, OSError) and error.errno in _ELSEWHERE


def _room(path: str) -> str:
    try:
        stat = os.statvfs(os.path.dirname(path))
    except OSError:
        return ""
    return f", {stat.f_bavail * stat.f_frsize:,} bytes are left"


def twice(work: Callable[[], T]) -> T:
    """What `work` returns, at the second attempt where the first failed by what may pass. It begins anew each time."""
    try:
        return work()
    except OSError as error:
        if error.errno not in _PASSING:
            raise
        return work()


def sentence(failed: str, troubles: Sequence[Trouble]) -> str:
    """What failed, on which ranks, and why. troubles: at least one"""
    first, *rest = troubles
    more = f"; rank{'s' if len(rest) > 1 else ''} {', '.join(str(each.rank) for each in rest)} too" if rest else ""
    return f"{failed}: rank {first.rank}: {first.text}{more}"
