"""Which cores are near a GPU: what a rank copies and launches should not cross from one socket to another.

Read from the files of NVIDIA's driver and of the PCI bus. A keeper loads this before it forks, where there is a GPU.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # not of `typing`, for the keeper's sake
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

DRIVER = "/proc/driver/nvidia/gpus"
BUS = "/sys/bus/pci/devices"


def cores_of(gpu: str, driver: str = DRIVER, bus: str = BUS) -> frozenset[int]:
    """The cores on the NUMA node of a GPU; none where nobody tells, as for a slice of one (MIG) or in some containers.

    gpu: as `CUDA_VISIBLE_DEVICES` names it; a number counts in the order of the bus, as CUDA does where all are alike
    """
    try:
        places = sorted(os.listdir(driver))
        if gpu.isdigit():
            place = places[int(gpu)]
        else:
            place = next(each for each in places if f"GPUUUID:{gpu}" in _told(f"{driver}/{each}/information"))
        with open(f"{bus}/{place.lower()}/local_cpulist") as file:
            return frozenset(listed(file.read()))
    except (OSError, IndexError, StopIteration, ValueError):
        return frozenset()


def listed(text: str) -> list[int]:
    """The numbers of a list as Linux writes them.

    >>> listed("0-2,8\\n")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def share(
    near: Sequence[Collection[int]], allowed: Collection[int], index: int, bound: bool
) -> tuple[set[int], int, int]:
    """The cores that a rank keeps to, and which part of how many it has of them; no cores: it is not to be confined.

    near: of each rank of the host, the cores near its GPU; bound: ranks are bound to parts
    Where ranks are free, each stays near its GPU if together they leave no core idle that is there for all.

    >>> share([{0, 1}, {2, 3}], {0, 1, 2, 3}, 1, bound=False)
    ({2, 3}, 0, 1)
    >>> share([{0, 1}, {0, 1}], {0, 1, 2, 3}, 1, bound=False)
    (set(), 0, 1)
    >>> share([{0, 1}, {0, 1}], {0, 1, 2, 3}, 1, bound=True)
    ({0, 1}, 1, 2)
    """
    mine = [set(allowed).intersection(each) for each in near]
    if not all(mine) or (not bound and set().union(*mine) != set(allowed)):
        return set(), 0, 1
    if not bound:
        return (mine[index], 0, 1) if mine[index] != set(allowed) else (set(), 0, 1)
    group = [rank for rank, cores in enumerate(mine) if cores == mine[index]]
    return mine[index], group.index(index), len(group)


def _told(path: str) -> str:
    """A file of the driver, without its blanks."""
    with open(path) as file:
        return "".join(file.read().split())
