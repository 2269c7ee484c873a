"""An agent with a reaper above it, as on another host than the launcher's: whoever of them is killed, nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from collectives.world import STATE_MEMORY
from launcher.linux import is_above, stat_of
from launcher.protocol import LAUNCHER_HOST, LAUNCHER_PID
from launcher.supervisor.environment import StateMemory

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

HERE = os.uname().nodename

# The child lives in a session of its own, as data loaders and services do.
SLEEP = """
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(os.getppid(), os.environ["DDP_AGENT"], child.pid, "ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def guarded(keep: Any) -> Any:
    """Starts an agent that finds no launcher above itself."""
    with subprocess.Popen(["true"]) as gone:
        return lambda body, **more: keep(body, **{LAUNCHER_HOST: HERE, LAUNCHER_PID: str(gone.pid), **more})


@pytest.fixture
def sleeping(guarded: Any) -> Any:
    """One whose rank has a child, `child`."""
    kept = guarded(SLEEP)
    kept.until(lambda: b"ready" in kept.out)
    parent, agent, kept.child = map(int, kept.out.split()[:3])
    assert parent == agent == kept.hello["agent"]
    return kept


def test_below_the_launcher_the_engine_starts_the_agent_itself(keep: Any) -> None:
    kept = keep("pass", **{LAUNCHER_HOST: HERE, LAUNCHER_PID: str(os.getpid())})
    assert kept.hello["started"] == kept.hello["agent"] == kept.job.process.pid
    kept.end()


def test_on_another_host_the_launchers_pid_is_another_process(keep: Any) -> None:
    kept = keep("pass", **{LAUNCHER_HOST: "elsewhere", LAUNCHER_PID: str(os.getpid())})
    assert kept.hello["started"] != kept.hello["agent"]
    kept.end()


@pytest.mark.parametrize(("host", "slots"), [(HERE, 0), ("elsewhere", 2)])
def test_only_where_the_launchers_memory_is_out_of_reach_the_agent_makes_its_own(
    guarded: Any, host: str, slots: int
) -> None:
    memory = StateMemory(1)
    token, *of_launcher = memory.variable.split()
    kept = guarded(f"print(os.environ[{STATE_MEMORY!r}])", **{LAUNCHER_HOST: host, STATE_MEMORY: memory.variable})
    kept.end()
    memory.close()
    assert len(kept.hello["slots"]) == slots
    assert kept.out.decode().split() == [token, *(kept.hello["slots"] or of_launcher)]


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


@pytest.mark.parametrize(
    ("kill", "victim"),
    [(os.kill, "agent"), (os.kill, "started"), (os.killpg, "started")],
    ids=["agent", "guard", "guard's group, as engines do"],
)
def test_kill_9_ends_all_that_the_rank_had_started(sleeping: Any, kill: Any, victim: str) -> None:
    kill(sleeping.hello[victim], signal.SIGKILL)
    if victim == "started":
        assert sleeping.next("parent_lost") == sleeping.hello["started"]
    sleeping.job.assert_gone(3)
    assert sleeping.job.process.wait(5) == -signal.SIGKILL


def test_kill_9_of_the_engine_is_told_as_such_and_ends_all(guarded: Any) -> None:
    kept = guarded(SLEEP, engine=[sys.executable, "-c", "import subprocess, sys\nsubprocess.run(sys.argv[1:])"])
    kept.until(lambda: b"ready" in kept.out)
    assert kept.hello["engine"] == kept.job.process.pid
    kept.job.process.kill()
    assert kept.next("parent_lost") == kept.job.process.pid
    kept.job.assert_gone(3)
