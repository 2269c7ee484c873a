"""Hosts that a job does without are asked, and taken as far as it may have more ranks."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from launcher.network import Host
from launcher.supervisor import returning_hosts
from launcher.supervisor.returning_hosts import ReturningHosts
from tests.conftest import executable

A, B, C = Host("a", 2), Host("b", 2), Host("c", 1)
SCRIPT = str(Path(__file__))


@pytest.fixture(autouse=True)
def _one_host_is_here(monkeypatch: Any) -> None:
    monkeypatch.setattr(returning_hosts.network, "is_here", lambda host: host == "here")


def of(shell: str, **settings: Any) -> ReturningHosts:
    """Hosts that are asked by this shell."""
    return ReturningHosts(Job(script=SCRIPT, **settings), {**os.environ, "HYDRA_LAUNCHER_EXEC": shell})


NOW = Job(script=SCRIPT, n=2, hosts=(A,), min_ranks=1)
BOTH = ((A, B), 4)
NONE = ((A,), 2)


@pytest.mark.parametrize(
    ("shell", "hostfile", "n", "limit", "taken"),
    [
        ("true", None, None, math.inf, BOTH),
        ("true", None, 3, math.inf, ((A, B), 3)),  # as many as were asked for
        ("true", None, None, 2, NONE),  # as many as micro_batches
        ("false", None, None, math.inf, NONE),  # it is still away
        ("no-such-shell", None, None, math.inf, NONE),
        ("true", "a:2\nc", None, math.inf, ((A, C), 3)),  # b is not wanted any more
        ("true", "", None, math.inf, BOTH),  # it is being written
        ("no-such-shell", "a:2\nhere:3", None, math.inf, ((A, Host("here", 3)), 5)),  # no shell is needed
    ],
)
def test_hosts_that_answer_are_taken(
    shell: str, hostfile: str | None, n: int | None, limit: float, taken: tuple[Any, int], tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    path.write_text(hostfile or "")
    before = (A, Host("here", 1)) if hostfile and "here" in hostfile else (A, B)
    hosts = of(shell, n=n, hosts=before, min_ranks=1, hostfile=None if hostfile is None else str(path))
    hosts.probe(NOW, limit)
    deadline = time.monotonic() + (20 if taken[1] > 2 else 0.5)
    while hosts.answered(NOW.hosts, limit)[1] <= 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    result = hosts.answered(NOW.hosts, limit)
    hosts.close()
    assert result == taken


def test_hosts_whose_ranks_fail_are_asked_less_often() -> None:
    hosts = of("true")
    pauses = []
    for _ in range(11):
        pauses.append(hosts.interval)
        hosts.failed()
    hosts.succeeded()
    assert [*pauses, hosts.interval] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 1]


def test_a_host_may_answer_later_than_the_next_probe(tmp_path: Path) -> None:
    hosts = of(executable(tmp_path / "slow", "#!/bin/sh\nsleep 1\n"), hosts=(A, B))
    deadline = time.monotonic() + 20
    while (answer := hosts.answered(NOW.hosts, math.inf)) == NONE and time.monotonic() < deadline:
        hosts.probe(NOW, math.inf)
        time.sleep(0.05)
    hosts.close()
    assert answer == BOTH


def test_a_job_that_has_all_ranks_that_it_may_asks_no_host() -> None:
    hosts = of("true", n=2, hosts=(A, B))
    hosts.probe(NOW, math.inf)
    time.sleep(0.1)
    hosts.max_ranks = None  # else they would not be taken in any case
    assert hosts.answered(NOW.hosts, math.inf) == NONE
