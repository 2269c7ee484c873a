"""The standard library's queues on our channels, so that tensors in them go by handle.

Locks, the feeder thread and the counting stay what they are; what changes is how an object becomes a message.
"""

from __future__ import annotations

import itertools
import multiprocessing.queues
import pickle
import queue
import time
from typing import Any

from ddp.multiprocessing._channels import make_pipe
from ddp.multiprocessing._parcels import Parcel, pack


class _Envelope:
    """An object on its way to the feeder thread, which packs it: its pickle is the number of the parcel."""

    __slots__ = ("_obj", "_queue")

    def __init__(self, queue: Any, obj: Any) -> None:
        self._queue, self._obj = queue, obj

    def __reduce__(self) -> tuple[Any, ...]:
        number = next(self._queue._numbers)
        self._queue._parcels[number] = pack(self._obj)
        return int, (number,)


class Queue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # no subscript before Python 3.12
    """A queue for several processes, as the standard library's; tensors go by handle and are shared from then on.

    Made by `ddp.multiprocessing.Queue(maxsize=0)`.
    """

    _reader: Any
    _writer: Any
    _rlock: Any
    _sem: Any
    _poll: Any
    _closed: bool

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        super().__init__(maxsize, ctx=ctx)
        _exchange_pipe(self)
        self._reset()

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]  # private: the stubs leave it out
        self._numbers = itertools.count()
        self._parcels: dict[int, Parcel] = {}
        self._send_bytes = self._ship

    def _ship(self, number: Any) -> None:
        self._writer.ship(self._parcels.pop(pickle.loads(number)))

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an object in, waiting for a free slot if the queue is full. It is packed and sent by another thread.

        Raises: queue.Full if there is no slot at once, or within `timeout` seconds; ValueError if the queue is closed.
        """
        super().put(_Envelope(self, obj), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes an object out, waiting for one if there is none.

        Raises: queue.Empty if there is none at once, or within `timeout` seconds; ValueError if the queue is closed.
        """
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._rlock.acquire(block, timeout):
            raise queue.Empty
        try:
            if not block or deadline is not None:
                left = 0.0 if deadline is None or not block else max(0.0, deadline - time.monotonic())
                if not self._poll(left):
                    raise queue.Empty
            parcel = self._reader.fetch()
            self._sem.release()
        finally:
            self._rlock.release()
        return parcel.open()


class JoinableQueue(Queue, multiprocessing.queues.JoinableQueue):  # type: ignore[type-arg]  # as above
    """A Queue whose `join` waits until `task_done` was called for each object."""


class SimpleQueue(multiprocessing.queues.SimpleQueue):  # type: ignore[type-arg]  # as above
    """A pipe with a lock at each end: `put` sends at once and blocks while the pipe is full."""

    _reader: Any
    _writer: Any
    _rlock: Any
    _wlock: Any

    def __init__(self, *, ctx: Any) -> None:
        super().__init__(ctx=ctx)
        _exchange_pipe(self)
        self._poll = self._reader.poll

    def get(self) -> Any:
        """Takes an object out, waiting for one if there is none."""
        with self._rlock:
            parcel = self._reader.fetch()
        return parcel.open()

    def put(self, obj: Any) -> None:
        """Puts an object in."""
        parcel = pack(obj)
        with self._wlock:
            self._writer.ship(parcel)


def _exchange_pipe(made: Any) -> None:
    """Puts a channel in the place of the pipe that the standard library made."""
    made._reader.close()
    made._writer.close()
    made._reader, made._writer = make_pipe(duplex=False)
