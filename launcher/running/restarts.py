"""Whether a job that failed starts again, when, and with how many ranks. Pure: `launcher.running.watch` acts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from launcher.hosts import Host
from launcher.job import Job

_LONGEST = 60.0  # s
# A job that ran for so long (s) before it failed is not failing again and again.
_SETTLED = 600.0


def pause(in_a_row: int) -> float:
    """Seconds to wait before a restart. in_a_row: failures without a long run between them, this one included

    The first restart comes at once, since most failures are of the kind that does not come back; then 1, 2, 4, ... 60.

    >>> [pause(number) for number in (1, 2, 3, 4, 9)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if in_a_row == 1 else min(2.0 ** min(in_a_row - 2, 6), _LONGEST)


def in_a_row(before: int, ran: float) -> int:
    """How many failures came one after the other, after one more. before: so far; ran: s that the attempt ran"""
    return 1 if ran >= _SETTLED else before + 1


def ranks_on(hosts: Sequence[Host], n: int, name: str | None) -> frozenset[int]:
    """The ranks of the host of that name, of a job of `n`.

    >>> sorted(ranks_on([Host("a", 2), Host("b", 2)], 3, "b"))
    [2]
    """
    return frozenset(rank for host, ranks in _dealt(hosts, n) if host.name == name for rank in ranks)


def lost_hosts(hosts: Sequence[Host], n: int, gone: Collection[int]) -> list[Host]:
    """The hosts of which no rank is left, of a job of `n`. gone: those that are not heard of

    None if that is true of all hosts, which says nothing about any of them.

    >>> lost_hosts([Host("a", 2), Host("b", 2)], 4, gone={2, 3})
    [Host(name='b', slots=2)]
    """
    used = [(host, ranks) for host, ranks in _dealt(hosts, n) if ranks]
    lost = [host for host, ranks in used if all(rank in gone for rank in ranks)]
    return [] if len(lost) == len(used) else lost


def _dealt(hosts: Sequence[Host], n: int) -> Iterator[tuple[Host, range]]:
    """Ranks fill the hosts in order."""
    first = 0
    for host in hosts:
        yield host, range(first, min(first + host.slots, n))
        first += host.slots


def smaller(job: Job, lost: Collection[Host]) -> Job | None:
    """The job on the hosts that are left; None if these take fewer than `job.min_ranks` ranks, or all are needed."""
    if not lost:
        return job
    left = tuple(host for host in job.hosts if host not in lost)
    slots = sum(host.slots for host in left)
    n = min(job.size, slots)
    if job.min_ranks is None or n < job.min_ranks:
        return None
    shown = None if job.ranks is None else tuple(rank for rank in job.ranks if rank < n) or None
    return replace(job, hosts=left, n=n, ranks=shown, debug_rank=job.debug_rank if job.debug_rank < n else 0)
