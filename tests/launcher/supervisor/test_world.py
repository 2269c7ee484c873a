"""Ranks that wait for each other: whoever fails, or leaves, is the one that is named."""

from __future__ import annotations

import re
from typing import Any

import pytest


@pytest.mark.mpi
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_ends_before_init_is_named_at_once(ddp_launch: Any, first: int) -> None:
    # Whoever comes first: rank 1 ends while rank 0 waits, or has ended when it begins to.
    body = f"if rank != {first}: time.sleep(0.5)\nif rank == 1: sys.exit(0)\nimport collectives\ncollectives.init()"
    says = r"ddp-launch: rank 1 \(pid \d+\) exited with code 0 before collectives.init\(\), where rank 0 waits"
    assert re.fullmatch(says, ddp_launch(body, code=1).last)


STOPPED = """
if rank == 1: {stops}
import collectives
collectives.init()
print("joined")
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("stops", "says"),
    [
        pytest.param("time.sleep(60)", r"rank 1 \(pid \d+\) sleeps, while rank 0 waits", marks=pytest.mark.long),
        (
            # mpiexec, or the proxy through which it starts the ranks: the agent's parent.
            "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]), signal.SIGSTOP)",
            r"\S+ \(pid \d+\) is stopped, while ranks 0-1 wait",
        ),
    ],
)
def test_who_keeps_the_others_in_init_is_named_at_the_hang_limit(ddp_launch: Any, stops: str, says: str) -> None:
    done = ddp_launch(STOPPED.format(stops=stops), options=("--hang-timeout", "3"), code=1, out="")
    assert re.fullmatch(rf"ddp-launch: nothing has moved for \d\.\d s: {says} in collectives.init\(\)", done.last)
