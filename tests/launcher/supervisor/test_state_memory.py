"""Memory that outlives the ranks: two slots for each, where a restart may come and all ranks are on this machine."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from collectives.world import STATE_MEMORY, STATE_MEMORY_NAME
from launcher.supervisor.environment import StateMemory
from tests.conftest import wait_until


def test_each_rank_has_two_slots_until_the_job_ends() -> None:
    memory = StateMemory(3)
    token, *slots = memory.variable.split()
    names = {os.readlink(f"/proc/{slot}") for slot in slots}
    assert (len(slots), names) == (6, {f"/memfd:{STATE_MEMORY_NAME}-{token} (deleted)"})
    memory.close()
    assert not any(os.path.exists(f"/proc/{slot}") for slot in slots)


def test_agents_on_other_hosts_stay_until_their_slots_are_not_needed() -> None:
    memory = StateMemory(1)
    own = memory.variable
    reapers = [Mock(), Mock()]
    for start, reaper in enumerate(reapers):
        ranks = Mock(slots=lambda: ["7/fd/3", "7/fd/4"])
        memory.keep(ranks, reaper)
        assert memory.variable == f"{own} 7/fd/3 7/fd/4"
        memory.complete(start + 1)
        assert (memory.variable, memory.held) == (own, start + 1)
        ranks.close.assert_called_once()
        reaper.end.assert_called_once()
        reaper.close.assert_not_called()  # it would wait, and the launcher has other things to do
    reapers[0].close.assert_called_once()  # it has ended since
    memory.close()
    reapers[1].close.assert_called_once()


def test_a_system_that_grants_none_or_not_enough(monkeypatch: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    granted = iter([os.memfd_create("x")])

    def create(name: str) -> int:
        for fd in granted:
            return fd
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", create)
    assert StateMemory(2).variable == ""
    assert set(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert StateMemory(257).variable == ""


@pytest.mark.mpi
@pytest.mark.parametrize(("options", "slots"), [((), 0), (("--max-restarts", "1"), 2)])
def test_it_is_there_where_a_restart_may_come(options: tuple[str, ...], slots: int, ddp_launch: Any) -> None:
    around = {**os.environ, STATE_MEMORY: "of a job around this one"}
    body = f"print(len(os.environ[{STATE_MEMORY!r}].split()[1:]))"
    ddp_launch(body, n=1, options=options, env=around, out=f"{slots}\n")


def who_has(token: str) -> list[str]:
    """The processes in which the memory of that job is open or mapped."""
    results = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            links = [os.readlink(fd) for fd in (process / "fd").iterdir()]
            if token in " ".join(links) + (process / "maps").read_text():
                results.append(process.name)
    return results


@pytest.mark.mpi
def test_it_is_freed_when_the_launcher_is_killed(start_launch: Any) -> None:
    body = f"""
import mmap, os, time
token, path, *_ = os.environ[{STATE_MEMORY!r}].split()
slot = os.open(f"/proc/{{path}}", os.O_RDWR)
os.ftruncate(slot, 1 << 20)
held = mmap.mmap(slot, 1 << 20)
print("ready", flush=True)
time.sleep(60)
"""
    job = start_launch(body, 1, ("--max-restarts", "1"))
    links = [os.readlink(fd) for fd in Path(f"/proc/{job.process.pid}/fd").iterdir()]
    [token] = {link.split()[0].rpartition("-")[2] for link in links if STATE_MEMORY_NAME in link}
    assert len(who_has(token)) >= 2
    job.process.kill()
    wait_until(lambda: not who_has(token), 10)
