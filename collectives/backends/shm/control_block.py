"""The control block of the ranks of a communicator on one node: headers, inline buffers, staging buffers for tiles.

Each rank writes only its own parts and reads the others'. Before a collective every rank publishes a header, its
sequence number last, and waits for the headers of all; so no rank is more than one call ahead, and two of everything
are enough: what call n wrote may be overwritten by call n + 2, since by then all have begun n + 1 and finished n.
Staging buffers work the same way, from one phase to the next.

Sound where stores of one CPU are seen by others in their order (x86-64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.backends.shm.segment import PAGE, Segment
from collectives.transport import HASH, SEQUENCE, WORDS

Array = np.ndarray[Any, Any]


#: Bytes of an inline buffer: an array up to this size travels with its header.
INLINE_BYTES = 64 << 10
#: Bytes of a staging buffer: tiles of it stay in a core's second-level cache.
STAGING_BYTES = 256 << 10
_LINE = 8  # int64 words of a cache line, so that no two ranks write into the same one


def control_bytes(size: int) -> int:
    """The size of a segment that holds a control block of `size` ranks."""
    return _control_bytes(size) + 2 * size * (INLINE_BYTES + STAGING_BYTES)


def _control_bytes(size: int) -> int:
    words = 2 * size * WORDS + size * _LINE
    return -(-words * 8 // PAGE) * PAGE


class ControlBlock:
    """One rank's view of the control block.

    words, bytes: the control part, as memoryviews, since their items are read twenty times as fast as an array's
    sequence: of this rank's last header; published: it belongs to a call that has not gone on from there
    """

    def __init__(self, segment: Segment, me: int, size: int) -> None:
        self.segment = segment
        self.me, self.size = me, size
        control = _control_bytes(size)
        memory = segment.memory
        self.bytes = memory[:control].data
        self.words = memory[:control].view(np.int64).data
        inline = memory[control : control + 2 * size * INLINE_BYTES].reshape(2, size, INLINE_BYTES)
        staging = memory[
            control + 2 * size * INLINE_BYTES : control + 2 * size * (INLINE_BYTES + STAGING_BYTES)
        ].reshape(2, size, STAGING_BYTES)
        self.inline = [[inline[parity, rank] for rank in range(size)] for parity in (0, 1)]
        self.staging = [[staging[parity, rank] for rank in range(size)] for parity in (0, 1)]
        self.sequence = 0
        self.published = False
        self.phase = 0
        self._turn = 0
        first = 2 * size * WORDS
        self._phases = [first + rank * _LINE for rank in range(size)]
        self.others = [rank for rank in range(size) if rank != me]

    # Headers ---------------------------------------------------------------------------------------------------------

    def header(self, parity: int, rank: int) -> int:
        """The index of that rank's header in `words`."""
        return (parity * self.size + rank) * WORDS

    def inline_buffer(self) -> Array:
        """(INLINE_BYTES,) uint8: where this rank puts what travels with the header of its next call."""
        return self.inline[(self.sequence + 1) & 1][self.me]

    def publish(self, words: Sequence[int]) -> None:
        """This rank's header of its next call, whose words after the sequence number these are."""
        self.sequence += 1
        at = self.header(self.sequence & 1, self.me)
        for place, word in enumerate(words, HASH):
            self.words[at + place] = word
        self.words[at + SEQUENCE] = self.sequence

    def missing(self) -> list[int]:
        """The ranks whose header of this call is not there yet; if all are, those that are behind in its phases."""
        parity = self.sequence & 1
        absent = [rank for rank in self.others if self.words[self.header(parity, rank)] < self.sequence]
        return absent or [rank for rank in self.others if self.words[self._phases[rank]] < self.phase]

    def met(self) -> bool:
        """True once all headers of this call are there."""
        words, sequence, parity = self.words, self.sequence, self.sequence & 1
        return all(words[(parity * self.size + rank) * WORDS] >= sequence for rank in self.others)

    def signatures(self) -> list[list[int]]:
        """The headers of this call, a list of words a rank."""
        first = self.header(self.sequence & 1, 0)
        flat = self.words[first : first + self.size * WORDS].tolist()
        return [flat[at : at + WORDS] for at in range(0, len(flat), WORDS)]

    # Staging buffers -------------------------------------------------------------------------------------------------

    def turn(self) -> list[Array]:
        """Every rank's staging buffer for the next tile: those of the tile before it may still be read."""
        self._turn ^= 1
        return self.staging[self._turn]

    def advance(self) -> None:
        """This rank has done its part of a phase."""
        self.phase += 1
        self.words[self._phases[self.me]] = self.phase

    def advanced(self) -> bool:
        """True once every rank has done its part of this phase."""
        words, phase = self.words, self.phase
        return all(words[self._phases[rank]] >= phase for rank in self.others)
