"""What is kept of one synchronized backward: when things happened on this rank, in nanoseconds of its clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp.parallel.exchange import Buckets


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the buckets of one plan hold. names: of each bucket's parameters; nbytes: of each bucket's memory."""

    names: tuple[tuple[str, ...], ...] = ()
    nbytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, buckets: Buckets) -> Contents:
        """What these buckets hold."""
        return cls(
            names=tuple(tuple(buckets.names[index] for index in members) for members in buckets.members),
            nbytes=tuple(int(buffer.nbytes) for buffer in buckets.memory.buffers),
        )


@dataclass(slots=True, kw_only=True)
class Step:
    """One synchronized backward on this rank. All times are host times, `time.monotonic_ns()`.

    Arrays on a GPU are computed and reduced after the host has asked for it: what is written here is then when the host
    asked, not when the device did it.

    number: how many synchronized backwards came before, the same on every rank
    forward: begin and end of the last forward before it; None if there was none
    begun, computed: backward began, and its last node ran; ended: all buckets were reduced
    control: the control message was launched, and had arrived; None if that is not known
    ready: of each bucket, when its last gradient was complete (begun, if nothing of it was to come)
    times: of each bucket, when it was launched and done; None if that is not known
    contents: what the buckets hold; `Timeline.add` writes it
    """

    number: int
    begun: int
    computed: int
    ended: int
    ready: Sequence[int]
    times: Sequence[tuple[int, int] | None]
    control: tuple[int, int] | None = None
    forward: tuple[int, int] | None = None
    contents: Contents = Contents()
