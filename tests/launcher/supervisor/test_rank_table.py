"""The ranks of a running job: what is said of those that wait for each other, and whose agents hold state."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from launcher.errors import LARGE_PACKETS
from launcher.supervisor.rank_table import RankProcess, RankTable


def rank_process(rank: int, **more: Any) -> RankProcess:
    ids = dict.fromkeys(("pid", "agent", "started", "engine"), 1)
    return RankProcess(Mock(), {"rank": rank, "name": "", **ids, **more})


def test_ranks_of_several_hosts_that_all_wait_point_to_their_network() -> None:
    for hosts, ends in ((("a", "b"), f"ranks 0-1 waited: {LARGE_PACKETS}"), (("a", "a"), "ranks 0-1 waited")):
        ranks = RankTable(2)
        for rank, host in enumerate(hosts):
            ranks[rank] = rank_process(rank, host=host)
            ranks[rank].joining = 60.0
        assert ranks.joining_timeout() == f"the world of all ranks was not there within 60 s, for which {ends}"


@pytest.mark.parametrize(("started", "kept"), [(1, []), (2, ["7/fd/3"])])
def test_agents_that_hold_state_stay_unless_the_reaper_has_to_end_a_rank(started: int, kept: list[str]) -> None:
    """Rank 0, on the launcher's host, runs still. started: 1: its agent is below the reaper; 2: below a supervisor"""
    ranks = RankTable(2)
    ranks[0] = rank_process(0, started=started)
    ranks[1] = rank_process(1, slots=["7/fd/3"])
    ranks[1].status = 0
    for process in ranks.values():
        process.held = True
    assert ranks.slots() == kept
    ranks[0].status = 1
    assert ranks.slots() == ["7/fd/3"]
