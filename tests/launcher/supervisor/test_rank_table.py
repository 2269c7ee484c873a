"""The ranks of a running job: what is said of those that wait for each other."""

from __future__ import annotations

from unittest.mock import Mock

from launcher.errors import LARGE_PACKETS
from launcher.supervisor.rank_table import RankProcess, RankTable


def test_ranks_of_several_hosts_that_all_wait_point_to_their_network() -> None:
    for hosts, ends in ((("a", "b"), f"ranks 0-1 waited: {LARGE_PACKETS}"), (("a", "a"), "ranks 0-1 waited")):
        ranks = RankTable(2)
        for rank, host in enumerate(hosts):
            ids = dict.fromkeys(("pid", "agent", "started", "engine"), 1)
            ranks[rank] = RankProcess(Mock(), {"rank": rank, "name": "", "host": host, **ids})
            ranks[rank].joining = 60.0
        assert ranks.joining_timeout() == f"the world of all ranks was not there within 60 s, for which {ends}"
