"""The MPI's own segment files: unlinked once all ranks of a node have mapped them, so that no kill leaves one behind.

An MPI removes its files in /dev/shm when it is finalized, and a killed process never comes to that. A file is needed
only until the last rank has mapped it. Which files those are stands in every rank's memory map.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

# MPICH's (one a node) and Open MPI 5's (one a rank, mapped by all when MPI starts). Both open no such file by name
# later, and neither complains in MPI_Finalize; of other MPIs that is not known, so theirs stay.
_NAMES = re.compile(r"/dev/shm/(mpich_shm_|sm_segment\.)[^/]+")


class SegmentFile(NamedTuple):
    """A file; device and inode tell it from one of the same name in another mount namespace."""

    path: str
    device: str
    inode: int


def mapped_here() -> frozenset[SegmentFile]:
    """The MPI's segment files that this process has mapped."""
    with contextlib.suppress(OSError):  # no /proc: none is known to be mapped
        return mapped(Path("/proc/self/maps").read_text())
    return frozenset()


def mapped(maps: str) -> frozenset[SegmentFile]:
    """The MPI's segment files in the text of a /proc/PID/maps; what is unlinked already is left out."""
    found = set()
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _NAMES.fullmatch(fields[5]) and not fields[5].endswith(" (deleted)"):
            found.add(SegmentFile(fields[5], fields[3], int(fields[4])))
    return frozenset(found)


def needless(ranks: Sequence[Collection[SegmentFile]]) -> frozenset[SegmentFile]:
    """The files that every rank of a node has mapped.

    >>> one, two = SegmentFile("/dev/shm/sm_segment.a", "00:17", 1), SegmentFile("/dev/shm/sm_segment.b", "00:17", 2)
    >>> needless([{one, two}, {one}]) == {one}
    True
    """
    return frozenset(ranks[0]).intersection(*ranks[1:])


def unlink(files: Collection[SegmentFile]) -> None:
    """Removes the names; the memory stays until nobody has it mapped."""
    for file in files:
        with contextlib.suppress(OSError):  # it has gone, or may not be removed: the MPI will try
            os.unlink(file.path)
