"""Ranks that wait for each other: whoever fails, or leaves, is the one that is named."""

from __future__ import annotations

import re
import textwrap
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


@pytest.fixture
def leaving(ddp_launch: Any) -> Any:
    """Runs two ranks of which rank 1 does something else while rank 0 waits for it in a collective."""

    def run(leaves: str) -> Any:
        return ddp_launch(WORLD.format(leaves=textwrap.dedent(leaves)))

    return run


@pytest.mark.mpi
class TestWhileAnotherWaits:
    def test_an_exception_is_shown_once_and_last(self, leaving: Any) -> None:
        done = leaving("raise ValueError('boom')")
        assert done.returncode == 1
        assert done.stderr.count("Traceback") == 1
        *_, error, sentence = done.stderr.splitlines()
        assert error == "ValueError: boom"
        assert sentence.startswith("ddp-launch: rank 1 (pid ")
        assert sentence.endswith("raised ValueError: boom")

    @pytest.mark.parametrize("how", ["sys.exit(3)", "raise SystemExit(3)"])
    def test_an_exit_status_is_the_jobs(self, leaving: Any, how: str) -> None:
        done = leaving(how)
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1].startswith("ddp-launch: rank 1 (pid ")
        assert done.stderr.splitlines()[-1].endswith("exited with code 3")
        assert "Traceback" not in done.stderr

    def test_leaving_with_0_is_an_error_of_who_left(self, leaving: Any) -> None:
        done = leaving("sys.exit(0)")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert "rank 1 has left (exit status 0) while rank 0 waits in all_reduce #1 (job.py:11)" in last

    def test_leaving_with_0_past_all_exit_handlers_too(self, leaving: Any) -> None:
        done = leaving("os._exit(0)")
        assert done.returncode == 1
        assert "ddp-launch: rank 1 (pid " in done.stderr
        assert "exited with code 0 while others were waiting (os._exit?)" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_ends_before_init_is_named_at_once(ddp_launch: Any, first: int) -> None:
    # Whoever comes first: rank 1 ends while rank 0 waits, or has ended when it begins to.
    done = ddp_launch(
        f"""
        if rank != {first}: time.sleep(1)
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
        ("os.kill(os.getpid(), signal.SIGSTOP)", r"rank 1 \(pid \d+\) is stopped, while rank 0 waits"),
        ("time.sleep(60)", r"rank 1 \(pid \d+\) sleeps, while rank 0 waits"),
        (
            # mpiexec, or the proxy through which it starts the ranks: the agent's parent.
            "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]), signal.SIGSTOP)",
            r"\S+ \(pid \d+\) is stopped, while ranks 0, 1 wait",
        ),
    ],
)
def test_who_keeps_the_others_in_init_is_named_at_the_hang_limit(ddp_launch: Any, stops: str, says: str) -> None:
    done = ddp_launch(STOPPED.format(stops=stops), options=("--hang-timeout", "3"))
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"ddp-launch: nothing has moved for \d\.\d s: {says} in collectives.init\(\)", last), last
