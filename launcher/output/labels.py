"""Who said it: the words in front of a rank's lines, and the names of several ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Labels:
    """The labels of `n` ranks, all of one width: `3` where there is one host, `node7:3` where there are several.

    hosts: names of the hosts as far as they are known beforehand; more may come with the ranks
    """

    def __init__(self, n: int, hosts: Iterable[str] = ()) -> None:
        self._digits = len(str(n - 1))
        self._names = {short(host) for host in hosts}
        self._hosts: dict[int, str] = {}
        self._known: dict[int, str] = {}

    def add(self, rank: int, host: str) -> None:
        """`rank` runs on `host`."""
        self._hosts[rank] = short(host)
        self._names.add(short(host))
        self._known.clear()

    @property
    def width(self) -> int:
        """Columns of a label."""
        return self._digits + (max(map(len, self._names)) + 1 if len(self._names) > 1 else 0)

    def __getitem__(self, rank: int) -> str:
        """
        >>> labels = Labels(12, ["node1.cluster", "node2.cluster"])
        >>> labels.add(3, "node2.cluster")
        >>> labels[3], labels[4]
        (' node2:3', '       4')
        """
        if rank not in self._known:
            host = self._hosts.get(rank, "") if len(self._names) > 1 else ""
            self._known[rank] = f"{host}:{rank}".rjust(self.width) if host else str(rank).rjust(self.width)
        return self._known[rank]


def short(host: str) -> str:
    """A host's name without its domain; an address as it is.

    >>> short("node7.cluster.example"), short("10.0.0.7"), short("fe80::1")
    ('node7', '10.0.0.7', 'fe80::1')
    """
    first, _, rest = host.partition(".")
    return host if first.isdigit() or ":" in host or not rest else first


def ranges(numbers: Iterable[int]) -> str:
    """Ranks in few words.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7,8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(_run(run) for run in runs)


def _run(run: Sequence[int]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
