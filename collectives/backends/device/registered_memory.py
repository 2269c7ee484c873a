"""Memory that NCCL moves without copies of its own: allocated by the library, and registered with one communicator.

Registering windows is collective, and taking it back may be. When an array dies differs from
rank to rank; so memory is taken back at a later `empty`, which all ranks call, once its arrays have died on every one.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.backends.device.cuda import Cuda
from collectives.backends.nccl import nccl_communicator
from collectives.backends.nccl.nccl_communicator import NcclCommunicator, Registered
from collectives.errors import NcclError
from collectives.transport import Steps, Transport

_ALIGNMENT = 4096  # bytes: NCCL_WIN_REQUIRED_ALIGNMENT
logger = logging.getLogger("collectives")

#: Has the thread that makes all calls into NCCL do a job.
Submit = Callable[[Callable[[], None]], Steps[None]]


class NcclMemory:
    """Some of it, as an array holds it. pointer: its address; nbytes: its size"""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer, self.nbytes = pointer, nbytes


class RegisteredMemory:
    """The registered memory of one rank's end of an NCCL communicator."""

    def __init__(self, cuda: Cuda, communicator: NcclCommunicator, submit: Submit) -> None:
        self._cuda, self._nccl, self._submit = cuda, communicator, submit
        # In the order in which they were made, the same on every rank: address, registration, and a reference that
        # gives None once no array holds the memory any more.
        self._segments: list[tuple[int, Registered, weakref.ref[NcclMemory]]] = []

    def allocate(self, nbytes: int, transport: Transport) -> Steps[NcclMemory | None]:
        """Memory of at least `nbytes`; None on every rank if one of them could not have it. Collective.

        Raises: NcclError if it cannot be registered.
        """
        yield from self._sweep(transport)
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        found: list[int] = []

        def allocate() -> None:
            try:
                found.append(nccl_communicator.allocate(self._nccl.nccl, size))
            except NcclError as error:
                logger.info("rank %d: memory for NCCL comes from CuPy: %s", self._nccl.rank, error)

        yield from self._submit(allocate)
        had = yield from _everyones(np.array([bool(found)]), transport)
        if not had.all():
            if found:
                yield from self._submit(functools.partial(nccl_communicator.free, self._nccl.nccl, found[0]))
            return None
        segment, made = NcclMemory(found[0], size), list[Registered]()
        yield from self._submit(lambda: made.append(self._nccl.register(segment.pointer, size)))
        self._segments.append((segment.pointer, made[0], weakref.ref(segment)))
        return segment

    def _sweep(self, transport: Transport) -> Steps[None]:
        """Gives back what no array holds any more, on any rank."""
        if not self._segments:
            return
        dead = yield from _everyones(np.array([held() is None for _, _, held in self._segments]), transport)
        over = [each for each, gone in zip(self._segments, dead.all(axis=0), strict=True) if gone]
        if not over:
            return
        self._segments = [each for each in self._segments if each not in over]

        def free() -> None:
            self._cuda.synchronize()  # kernels of any stream may still use what Python has let go of
            for pointer, registered, _ in over:
                if registered.handle.value:  # else the library could not register it
                    self._nccl.deregister(registered)
                nccl_communicator.free(self._nccl.nccl, pointer)

        yield from self._submit(free)


def _everyones(mine: Any, transport: Transport) -> Steps[Any]:
    """(size, n) bool of all ranks' (n,) bool. Collective."""
    everyones = np.empty(transport.size * len(mine), np.uint8)
    yield transport.all_gather(mine.view(np.uint8), everyones, [len(mine)] * transport.size)
    return everyones.reshape(transport.size, len(mine)).view(bool)
