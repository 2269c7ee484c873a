"""The control message: what ranks must agree on, once for each synchronized backward.

It is a message of its own, and no part of a gradient, because hooks may round, drop or shard gradients. It is float64,
and summed over the ranks. It is launched before the first bucket, so the total weight is known when the first sum
arrives. Values of single ranks are in a table with a row for each rank. A rank fills its own row and leaves zeros in
the others, so that the sum holds all rows.

The message also carries requests: to stop, to save, to complete a save that this rank has written in the background, to
hold the state in memory, to end and continue on another number of ranks. A signal may reach one rank only, at any
moment, and ranks that act on it after different steps would wait for each other for ever. After a synchronized backward
all ranks have received the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp, Work
from ddp.errors import ParallelError

Array = np.ndarray[Any, Any]
STOP, SAVE, SAVED, HOLD, RESIZE = range(5)
REQUEST_KINDS = 5
NO_CHECKSUM = -1.0
# A rank that is out of data sends this in place of its number of skipped backwards.
NOT_COUNTED = np.inf
# Indices into the message, which begins with these four numbers, the requests, and a used bit for each parameter.
_WEIGHT, _WEIGHTED, _JOINED, _JOINED_WEIGHT, _REQUESTS = range(5)
_USED = _REQUESTS + REQUEST_KINDS
# How many numbers a rank's row has in front of its timestamps.
_OWN = 2


class PendingRequests:
    """The requests of this rank, and those received from all ranks.

    requested: may be set at any time, also by a signal handler; sent with the next synchronized backward
    received: for each request, the largest number of ranks that made it in one message since the last `clear`
    """

    def __init__(self) -> None:
        self.requested = [False] * REQUEST_KINDS
        self.received = [0] * REQUEST_KINDS

    def receive(self, counts: Sequence[int]) -> None:
        """Records the requests of a message that has arrived."""
        self.received = [max(pair) for pair in zip(self.received, counts, strict=True)]

    def clear(self, request: int) -> None:
        """Forgets a request, such as SAVE: this rank's own, and those received."""
        self.requested[request] = False
        self.received[request] = 0


class ControlMessage:
    """The control message of one model. It is sent again and again; only one is in flight at a time.

    array: (9 + parameters + micro_batches + size * (2 + width),) float64: the weight, whether one was given, whether
    this rank is out of data (joined), its weight if so, its requests, a used bit for each parameter, the weight of each
    micro-batch; then a row for each rank: a checksum, how many backwards it skipped, and `width` timestamps of the last
    step. After `wait` it is the sum of all ranks' arrays
    """

    def __init__(self, comm: Communicator, parameters: int, width: int, micro_batches: int = 0) -> None:
        self._comm = comm
        self._bits = _USED + parameters
        self._rows = self._bits + micro_batches
        self.array: Array = np.zeros(self._rows + comm.size * (_OWN + width))
        self._table = self.array[self._rows :].reshape(comm.size, _OWN + width)
        self._work: Work[Any] | None = None
        self._part = ""  # what this rank did, for an error message

    def send(
        self,
        weight: float | None,
        used: Sequence[bool],
        checksum: float = NO_CHECKSUM,
        timestamps: Array | None = None,
        joined: bool = False,
        requests: Sequence[bool] = (False,) * REQUEST_KINDS,
        skipped: int = 0,
        micro_batches: tuple[range, Sequence[float | None]] | None = None,
    ) -> None:
        """Launches the message with this rank's part.

        weight: None: no weight was given, which counts as 1
        used: (parameters,) whether this rank used each; requests: (REQUEST_KINDS,) whether this rank makes each
        checksum: of the parameters, a whole number below 2^53; timestamps: (width,) of the last step
        joined: this rank is out of data; its weight counts only if no rank with data gives a weight
        skipped: backwards that this rank skipped since the last message
        micro_batches: (the micro-batches of this rank, the weight of each). With them the mean is over these weights,
        and `weight` only says whether weights were given
        """
        array = self.array
        array[self._bits :] = 0
        counted = 1.0 if weight is None else weight
        array[_WEIGHT], array[_JOINED_WEIGHT] = (0.0, counted) if joined else (counted, 0.0)
        array[_WEIGHTED] = weight is not None and not joined
        called = "called loss.backward()" if weight is None else "called model.backward(loss, weight=...)"
        self._part = "is out of data, inside join" if joined else called
        array[_JOINED] = joined
        array[_REQUESTS:_USED] = requests
        array[_USED : self._bits] = used
        if micro_batches is not None:
            own, weights = micro_batches
            array[self._bits + own.start : self._bits + own.stop] = [
                1.0 if weight is None else weight for weight in weights
            ]
        row = self._table[self._comm.rank]
        row[:_OWN] = checksum, NOT_COUNTED if joined else skipped
        if timestamps is not None:
            row[_OWN:] = timestamps
        if self._comm.size > 1:
            self._work = self._comm.all_reduce(array, ReduceOp.SUM, out=array, async_op=True)

    def agreement(self) -> Array:
        """(4 + parameters,) weights and used bits. A captured step is right only as long as these do not change."""
        return np.concatenate([self.array[:_REQUESTS], self.array[_USED : self._bits] > 0])

    def clone(self) -> ControlMessage:
        """An empty message for the same parameters and ranks, without weights of micro-batches."""
        size = self._comm.size
        return ControlMessage(self._comm, self._bits - _USED, (len(self.array) - self._rows) // size - _OWN)

    def done(self) -> bool:
        """Whether the message has arrived on this rank."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Waits until the message has arrived. Raises: the error of the collective."""
        if self._work is not None:
            self._work.wait()

    def times(self) -> tuple[int, int] | None:
        """When the message was launched and when it arrived, in monotonic nanoseconds; None if that is not known."""
        times = None if self._work is None else self._work.times()
        return None if times is None else (times[0], times[2])

    def scale(self) -> float:
        """The factor that turns the sum of gradients into their mean; 0 if the ranks' weights add up to 0."""
        total = float(self.array[_WEIGHT])
        if self._rows > self._bits:
            total = math.fsum(self.array[self._bits : self._rows])  # rounds only once, so equal on any number of ranks
        if self.weighted_ranks() == 0:
            total += float(self.array[_JOINED_WEIGHT])
        return 1.0 / total if total != 0.0 else 0.0

    def weighted_ranks(self) -> int:
        """How many of the ranks with data gave a weight."""
        return int(self.array[_WEIGHTED])

    def check_weights(self) -> None:
        """Checks that all ranks with data, or none, gave a weight. Raises: ParallelError, on every rank, if not."""
        active = self._comm.size - int(self.array[_JOINED])
        weighted = self.weighted_ranks()
        if weighted not in (0, active):
            raise ParallelError(
                f"rank {self._comm.rank} {self._part}; {weighted} of {active} ranks with data gave a weight: all of "
                "these must call the same, model.backward(loss, weight=...) or loss.backward()"
            )

    def requests(self) -> list[int]:
        """How many ranks made each request."""
        return [int(count) for count in self.array[_REQUESTS:_USED]]

    def used(self) -> list[bool]:
        """Whether any rank used each parameter."""
        flags: list[bool] = (self.array[_USED : self._bits] > 0).tolist()
        return flags

    def checksums(self) -> Array:
        """(size,) the ranks' checksums, NO_CHECKSUM where a rank took none."""
        return self._table[:, 0]

    def skipped(self) -> Array:
        """(size,) how many backwards each rank skipped, NOT_COUNTED for a rank that is out of data."""
        return self._table[:, 1]

    def timestamps(self) -> Array:
        """(size, width) the ranks' timestamps."""
        return self._table[:, _OWN:]
