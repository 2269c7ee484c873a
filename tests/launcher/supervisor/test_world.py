"""Ranks that wait for each other: whoever fails, or leaves, is the one that is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

WORLD = """
import numpy as np
import collectives
comm = collectives.init(timeout=60)
comm.all_reduce(np.ones(1))
if rank == 1:
    {leaves}
comm.all_reduce(np.ones(1))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("leaves", "code", "says"),
    [
        ("raise ValueError('boom')", 1, r"rank 1 \(pid \d+\) raised ValueError: boom"),
        ("sys.exit(0)", 1, r".*rank 1 has left \(exit status 0\) while rank 0 waits in all_reduce #1 \(job.py:11\).*"),
        # past all exit handlers
        ("os._exit(0)", 1, r"rank 1 \(pid \d+\) exited with code 0 while others were waiting \(os._exit\?\)"),
    ],
)
def test_who_leaves_while_another_waits_is_named(ddp_launch: Any, leaves: str, code: int, says: str) -> None:
    done = ddp_launch(WORLD.format(leaves=leaves))
    assert done.returncode == code
    assert re.fullmatch(f"ddp-launch: {says}", done.stderr.splitlines()[-1]), done.stderr
    assert done.stderr.count("Traceback") == ("raise" in leaves or leaves == "sys.exit(0)")


@pytest.mark.mpi
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_ends_before_init_is_named_at_once(ddp_launch: Any, first: int) -> None:
    # Whoever comes first: rank 1 ends while rank 0 waits, or has ended when it begins to.
    done = ddp_launch(
        f"""
        if rank != {first}: time.sleep(0.5)
        if rank == 1: sys.exit(0)
        import collectives
        collectives.init()
        """
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"ddp-launch: rank 1 \(pid \d+\) exited with code 0 before collectives.init\(\), where rank 0 waits", last
    )


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
        ("time.sleep(60)", r"rank 1 \(pid \d+\) sleeps, while rank 0 waits"),
        (
            # mpiexec, or the proxy through which it starts the ranks: the agent's parent.
            "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]), signal.SIGSTOP)",
            r"\S+ \(pid \d+\) is stopped, while ranks 0-1 wait",
        ),
    ],
)
def test_who_keeps_the_others_in_init_is_named_at_the_hang_limit(ddp_launch: Any, stops: str, says: str) -> None:
    done = ddp_launch(STOPPED.format(stops=stops), options=("--hang-timeout", "3"))
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"ddp-launch: nothing has moved for \d\.\d s: {says} in collectives.init\(\)", last), last
