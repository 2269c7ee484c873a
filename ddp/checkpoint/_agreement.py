"""All ranks or none: each does its part, and then all know whether everybody's succeeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout
from collectives.heartbeat import Heartbeat
from ddp.checkpoint._trouble import Failed, Trouble, sentence
from ddp.errors import CheckpointError

T = TypeVar("T")

PATIENCE = 1800.0  # s without a byte, or an answer from the disk, after which a rank is given up


class Agreement:
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

    def reach(self, failed: str, work: Callable[[], T]) -> list[T]:
        """What `work` returned on each rank, on all of them; what is pickled, as ranks of one job do.

        failed: how the error begins
        Raises: CheckpointError on every rank if `work` raised on one; PeerLeft and its kin if a rank is gone.
        """
        if self._broken is not None:
            raise CheckpointError(f"{failed}: {self._broken}")
        mine: T | Trouble
        cause: Exception | None = None
        self._beat = Heartbeat(self._comm, PATIENCE)
        try:
            with self._beat:
                try:
                    mine = work()
                except Exception as error:
                    cause = error
                    text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
                    mine = Trouble(self.rank, text)
        except CollectiveTimeout as error:  # ranks will not meet again
            self._broken = f"in an earlier save, {error}"
            raise CheckpointError(f"{failed}: {error}") from error
        if self._beat.failed:
            raise CheckpointError(f"{failed}: rank {self._beat.failed[0]} was interrupted")
        told: list[T | Trouble] = self._comm.all_gather_object(mine)
        troubles = [each for each in told if isinstance(each, Trouble)]
        if troubles:
            raise CheckpointError(sentence(failed, troubles)) from cause
        return [each for each in told if not isinstance(each, Trouble)]


def together(comm: Communicator, what: str, work: Callable[[], T]) -> list[T]:
    """What `work`, which takes no longer than a collective may, returned on each rank. Collective of several ranks.

    Raises: on every rank, what `work` raised there; on the others CheckpointError, with the words of the first.
    """
    mine: T | Trouble
    mistake: Exception | None = None
    try:
        mine = work()
    except Exception as error:
        mistake = error
        mine = Trouble(comm.rank, f"{type(error).__name__}: {error}")
    told: list[T | Trouble] = [mine] if comm.size == 1 else comm.all_gather_object(mine)
    if mistake is not None:
        raise mistake
    for each in told:
        if isinstance(each, Trouble):
            raise CheckpointError(f"rank {each.rank} could not {what}: {each.text}")
    return [each for each in told if not isinstance(each, Trouble)]
