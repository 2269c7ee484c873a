"""How images that lie in the order of their axes are walked: planes of one channel each, cut into parts."""

from __future__ import annotations

import math

from ddp.ops._op import Array
from ddp.ops.cuda._source import THREADS

# Planes are cut into `parts` of `length` numbers. members: how many planes have a statistic of theirs together; 0: all
# of a channel have.
PLANES = """
// How the threads of a block stand before parts of planes: `lanes` side by side, each line before a part.
template <int V> struct Stand {
    Index positions, length, parts;
    int lanes, lines, lane, line;

    __device__ Stand(Index positions, Index length, Index parts) : positions(positions), length(length), parts(parts) {
        lanes = length / V < blockDim.x ? (int)(length / V) : (int)blockDim.x;
        if (lanes == 0) lanes = 1;
        lines = blockDim.x / lanes;
        lane = threadIdx.x % lanes;
        line = threadIdx.x / lanes;
    }
    __device__ Index plane(Index item) const { return parts == 1 ? item : (Index)((unsigned)item / (unsigned)parts); }
    __device__ Index begin(Index item, Index plane) const { return (item - plane * parts) * length; }
    __device__ Index packs(Index begin) const { return (positions - begin < length ? positions - begin : length) / V; }
};

// f(first, packs): the parts of channel c that are those of the thread's line, among the shares of `chunks` blocks.
template <int V, class F> __device__ void each_part(
    const Stand<V>& at, Index samples, Index channels, Index c, Index chunk, Index chunks, F f
) {
    if (at.line >= at.lines) return;
    for (Index item = chunk * at.lines + at.line; item < samples * at.parts; item += chunks * at.lines) {
        Index sample = at.plane(item), begin = at.begin(item, sample);
        f((sample * channels + c) * at.positions + begin, at.packs(begin));
    }
}
"""

_BLOCKS = 1024  # at most that share the planes: some for each multiprocessor
_LENGTH = 1 << 13  # of a part at most: some packs for each thread of a block
FEW = 64  # threads that join a few shares


def parts(positions: int) -> tuple[int, int]:
    """The length of a part, of whole packs, and how many there are of a plane."""
    length = -(-positions // (8 * max(1, -(-positions // _LENGTH)))) * 8
    return length, max(1, -(-positions // max(length, 1)))


def _lines(x: Array, positions: int, length: int) -> int:
    """How many parts a block takes at a time."""
    lanes = 16 // x.itemsize
    return max(1, THREADS // max(1, length // lanes if positions % lanes == 0 else length))


class Planes:
    """How images lie: (samples, channels, positions), with a statistic for `members` planes of a sample, or of all."""

    def __init__(self, x: Array, groups: int = 0) -> None:
        self.samples, self.channels = x.shape[:2]
        self.positions = math.prod(x.shape[2:])
        self.members = self.channels // groups if groups else 0
        self.count = max(1, (self.members or self.samples) * self.positions)
        self.length, self.parts = parts(self.positions)
        self.planes = self.samples * self.channels
        self.blocks = -(-self.planes * self.parts // _lines(x, self.positions, self.length))

    def drawn(self) -> tuple[int, ...]:
        """What the kernels that draw end with."""
        return self.planes, self.channels, self.members, self.positions, self.length, self.parts


def chunks(x: Array, samples: int, channels: int, positions: int, length: int, parts: int) -> int:
    """How many blocks share a channel."""
    return max(1, min(_BLOCKS // max(channels, 1), -(-samples * parts // _lines(x, positions, length))))
