"""What a timeout says: which rank is late, and what that one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from collectives.backends.single import SingleTransport
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.waiting import describe_late

ORDER = "Every rank must make the same calls in the same order"


class Waiting(SingleTransport):
    """One of several ranks, waiting for `missing` as far as that is known. pids: of the ranks on this machine"""

    def __init__(self, missing: Sequence[int], pids: Mapping[int, int]) -> None:
        super().__init__()
        self._missing = missing
        self._pids = pids

    def late(self) -> Sequence[int]:
        return self._missing

    def pid(self, rank: int) -> int | None:
        return self._pids.get(rank)


@pytest.mark.parametrize(
    ("missing", "peers", "says"),
    [
        ([1], None, f"Rank 1 has not arrived. {ORDER}"),
        ([1, 2, 3], None, f"Ranks 1-3 have not arrived. {ORDER}"),
        ([], None, f"{ORDER}; one has not arrived, or hangs elsewhere"),
        # Of a send or a receive, only the other end matters; of a receive from any source, every other rank.
        ([2], [1], f"Rank 1 has not made the call that it answers. {ORDER}"),
        ([2], [0, 1, 3], f"Ranks 0-1, 3 have not made the call that it answers. {ORDER}"),
    ],
)
def test_who_is_late(missing: list[int], peers: list[int] | None, says: str) -> None:
    assert describe_late(call_of(peers), Waiting(missing, {})) == says


def call_of(peers: list[int] | None = None) -> CollectiveOp[Any]:
    call: CollectiveOp[Any] = CollectiveOp(Plan("barrier"), 1.0)
    call.peers = peers
    return call


def test_of_many_late_ranks_the_first_are_described() -> None:
    lines = describe_late(call_of(), Waiting(range(1, 100), dict.fromkeys(range(2, 100), 2**22 + 1))).splitlines()
    assert lines[0] == "Ranks 1-99 have not arrived:"
    assert lines[1:-1] == [f"  rank {rank} (pid {2**22 + 1}): there is no process {2**22 + 1}" for rank in range(2, 9)]
    assert lines[-1] == f"  {ORDER}."
