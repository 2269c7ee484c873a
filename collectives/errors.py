"""What can go wrong between ranks, as one tree:

    CollectivesError (RuntimeError)
    ├── WorldError                      the world is not the one the launcher promised, or cannot be reached
    ├── BackendError                    a backend asked for by name cannot be used
    │   └── TooManyCommunicators        MPI has no room for another one; all ranks raise it, and can go on
    ├── ArgumentError (ValueError)      a collective was called with arguments it cannot take
    │   └── DtypeError (TypeError)      … or with a dtype it cannot take
    ├── MismatchError                   ranks made different calls at the same place in the order
    ├── CommunicatorClosed              a call on a communicator after close()
    ├── CollectiveInterrupted           an earlier call was interrupted half-way; the communicator cannot go on
    ├── CollectiveTimeout (TimeoutError)  a collective passed its time limit
    ├── PeerLeft                        a rank left the job, or failed, while this one waits for it
    ├── NcclError                       a call of NCCL failed, with NCCL's own words
    └── RecordError                     a process's flight record cannot be read

A message says what was asked, what was expected, what was got, on which rank, and what to do next.
"""

from __future__ import annotations

import os


class CollectivesError(RuntimeError):
    """The root: anything that `collectives` raises on purpose."""


class WorldError(CollectivesError):
    """The world is not the one the launcher promised, or cannot be reached."""


def no_rank(rank: int, size: int) -> WorldError:
    """What every call of a communicator raises in a process that a rank has forked or started."""
    return WorldError(
        f"this process works for rank {rank} of {size} and is no rank: it has comm.rank and comm.size, and makes no "
        "calls. Make them in the rank itself; ddp-launch starts a program in a world of its own"
    )


class BackendError(CollectivesError):
    """A backend asked for by name cannot be used; it never falls back."""


class TooManyCommunicators(BackendError):
    """MPI has no room for another communicator. Every rank raises it, and those that there are can be used."""


class ArgumentError(CollectivesError, ValueError):
    """A collective was called with arguments it cannot take."""


class DtypeError(ArgumentError, TypeError):
    """A collective was called with a dtype it cannot take, or with something that is no array."""


class MismatchError(CollectivesError):
    """Ranks made different calls at the same place in the order."""


class CommunicatorClosed(CollectivesError):
    """A call on a communicator after `close()`."""


class CollectiveInterrupted(CollectivesError):
    """An earlier call on this communicator was interrupted half-way, so ranks no longer agree on what comes next."""


class CollectiveTimeout(CollectivesError, TimeoutError):
    """A collective passed its time limit; the communicator is broken from then on."""


class PeerLeft(CollectivesError):
    """A rank left the job, or failed, while this one waits for it."""


class NcclError(CollectivesError):
    """A call of NCCL failed; the message has the call, the result code's meaning and NCCL's own last error."""


class RecordError(CollectivesError):
    """A process's flight record cannot be read: there is none, it is not ours to read, or it is damaged."""


def how_to_install(extra: str) -> str:
    """The command that brings an extra of this project: from the folder of its sources, or from the package index."""
    sources = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.exists(os.path.join(sources, "setup.cfg")):
        return f"pip install -e '{sources}[{extra}]'"
    return f"pip install 'ddp-runtime[{extra}]'"
