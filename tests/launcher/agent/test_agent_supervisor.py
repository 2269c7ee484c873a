"""An agent with a reaper above it, as on another host than the launcher's: whoever of them is killed, nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from launcher.linux import is_above, stat_of
from launcher.protocol import LAUNCHER_PID

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

# The child lives in a session of its own, as data loaders and services do.
SLEEP = """
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(os.getppid(), os.environ["DDP_AGENT"], child.pid, "ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def gone() -> int:
    """The pid of a process that is not above any other."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.fixture
def guarded(keep: Any, gone: int) -> Callable[..., Any]:
    """Starts an agent that finds no launcher above itself."""
    return lambda body, **more: keep(body, **more, **{LAUNCHER_PID: str(gone)})


@pytest.fixture
def sleeping(guarded: Any) -> Any:
    """One whose rank has a child, `child`."""
    kept = guarded(SLEEP)
    kept.until(lambda: b"ready" in kept.out)
    parent, agent, kept.child = map(int, kept.out.split()[:3])
    assert parent == agent == kept.hello["agent"]
    return kept


def test_below_the_launcher_the_engine_starts_the_agent_itself(keep: Any) -> None:
    kept = keep("pass", **{LAUNCHER_PID: str(os.getpid())})
    assert kept.hello["started"] == kept.hello["agent"] == kept.job.process.pid
    kept.end()


def test_elsewhere_it_starts_the_guard(sleeping: Any) -> None:
    started, agent = sleeping.hello["started"], sleeping.hello["agent"]
    assert started == sleeping.job.process.pid
    assert sleeping.hello["engine"] == os.getpid()
    assert stat_of(agent).parent == started
    assert os.getpgid(agent) != os.getpgid(started)
    assert is_above(stat_of(os.getppid()).parent)
    assert not is_above(agent)


@pytest.mark.parametrize(
    ("how", "status"),
    [("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 2)", -2)],
)
def test_it_ends_as_the_rank_did(guarded: Any, how: str, status: int) -> None:
    kept = guarded(f"signal.signal(signal.SIGINT, signal.SIG_DFL)\n{how}")
    assert kept.end()["end"] == status
    assert kept.job.process.returncode == status


def test_kill_9_of_the_agent_ends_what_the_rank_had_started(sleeping: Any) -> None:
    os.kill(sleeping.hello["agent"], signal.SIGKILL)
    sleeping.job.assert_gone(3)
    assert sleeping.job.process.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("group", [False, True])
def test_kill_9_of_the_guard_ends_all(sleeping: Any, group: bool) -> None:
    started = sleeping.hello["started"]
    if group:  # as engines do
        os.killpg(started, signal.SIGKILL)
    else:
        os.kill(started, signal.SIGKILL)
    assert sleeping.next("parent_lost") == started
    sleeping.job.assert_gone(3)


def test_kill_9_of_the_engine_is_told_as_such_and_ends_all(guarded: Any) -> None:
    kept = guarded(SLEEP, engine=[sys.executable, "-c", "import subprocess, sys\nsubprocess.run(sys.argv[1:])"])
    kept.until(lambda: b"ready" in kept.out)
    assert kept.hello["engine"] == kept.job.process.pid
    kept.job.process.kill()
    assert kept.next("parent_lost") == kept.job.process.pid
    kept.job.assert_gone(3)
