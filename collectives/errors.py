"""The errors of `collectives`, as one tree:

    CollectivesError (RuntimeError)
    ├── WorldError                      the world is not the one that the launcher promised, or cannot be reached
    ├── BackendError                    a backend, NCCL or this rank's GPU cannot be used
    │   └── TooManyCommunicators        MPI has no room for another communicator; existing ones still work
    ├── ArgumentError (ValueError)      a function or method was called with invalid arguments
    │   └── DtypeError (TypeError)      or with a dtype that it does not support
    ├── MismatchError                   ranks made different calls at the same place in the order
    ├── CommunicatorClosed              a call on a communicator after close()
    ├── CollectiveInterrupted           an earlier call was interrupted before its end; the communicator is broken
    ├── CollectiveTimeout (TimeoutError)  a collective exceeded its time limit
    ├── PeerLeft                        a rank exited or failed while this one waits for it
    ├── NcclError                       NCCL or a GPU failed; the message has NCCL's own text, if there is one
    └── RecordError                     a process's flight record cannot be read

As far as it applies, a message says what was asked, what was expected and what was got, on which rank, and what to do
next.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence


class CollectivesError(RuntimeError):
    """The base class of this package's errors."""


class WorldError(CollectivesError):
    """The world is not the one that the launcher promised, or cannot be reached, or this process is not a rank."""


def no_rank(rank: int, size: int) -> WorldError:
    """The error of every communicator call in a process that a rank has forked or started."""
    return WorldError(
        f"this process works for rank {rank} of {size} and is no rank: it has comm.rank and comm.size, and makes no "
        "calls. Make them in the rank itself; ddp-launch starts a program in a world of its own"
    )


class BackendError(CollectivesError):
    """A backend, NCCL or this rank's GPU cannot be used. A backend requested by name is never replaced by another."""


class TooManyCommunicators(BackendError):
    """MPI has no room for another communicator; existing ones still work.

    `duplicate` and `split` raise it on every rank, `create_group` on each rank on which MPI reports it.
    """


class ArgumentError(CollectivesError, ValueError):
    """A function or method of this package was called with invalid arguments."""


class DtypeError(ArgumentError, TypeError):
    """A collective was called with a dtype that it does not support, or with something that is not an array."""


class MismatchError(CollectivesError):
    """Ranks made different calls at the same place in the order."""


class CommunicatorClosed(CollectivesError):
    """A call on a communicator after `close()`."""


class CollectiveInterrupted(CollectivesError):
    """An earlier call on this communicator was interrupted before its end: ranks may disagree on the next call."""


class CollectiveTimeout(CollectivesError, TimeoutError):
    """A collective exceeded its time limit, and its communicator is broken from then on.

    Also raised if only the timeout of `Work.wait` has passed; then the communicator is still usable.
    """


class PeerLeft(CollectivesError):
    """A rank exited or failed while this one waits for it."""


class NcclError(CollectivesError):
    """An NCCL call, or an operation on the GPU, failed.

    For a call, the message names it, explains the result code and quotes NCCL's last error, if there is one.
    """


class RecordError(CollectivesError):
    """A process's flight record cannot be read, for example because it does not exist or belongs to another user."""


def copy_error(error: BaseException) -> BaseException:
    """A copy of an exception. One instance that is raised in several places would collect the tracebacks of all."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


#: The folder that holds the three packages.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this project: from its source folder, or from the package index."""
    if os.path.exists(os.path.join(ROOT, "setup.cfg")):
        return f"pip install -e '{ROOT}[{extra}]'"
    return f"pip install 'ddp-runtime[{extra}]'"


# `format_ranks` prints at most this many parts. A part is a rank or a range of ranks.
_MAX_PARTS = 8


def format_ranks(ranks: Sequence[int]) -> str:
    """The ranks' numbers as text: `format_ranks([0, 1, 2, 5]) == "0-2, 5"`. After 8 ranges the rest is only counted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_PARTS])
    hidden = sum(last - first + 1 for first, last in runs[_MAX_PARTS:])
    return f"{text} and {hidden} more" if hidden else text


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks as a noun: `name_ranks([1, 2, 5]) == "ranks 1-2, 5"`, `name_ranks([3]) == "rank 3"`."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"


def align_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The rows of a table as lines of text, in which each column has the width of its longest cell.

    right: the indices of the columns that are aligned right, such as those of numbers
    """
    formats = []
    for index, column in enumerate(zip(*rows, strict=True)):
        side = ">" if index in right else "<"
        formats.append(f"{side}{max(map(len, column))}")
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def ranks_with_verb(ranks: Sequence[int], of_one: str, of_several: str) -> str:
    """The ranks as a noun, with the verb for one or several: `ranks_with_verb([3], "has", "have") == "rank 3 has"`."""
    return f"{name_ranks(ranks)} {of_one if len(ranks) == 1 else of_several}"
