"""Memory that outlives the ranks: two slots for each, where a restart may come and all ranks are on this machine."""

from __future__ import annotations

import errno
import os
import resource
from typing import Any

import pytest

from collectives.world import STATE_MEMORY, STATE_MEMORY_NAME
from launcher.engines.mpich import MpichEngine
from launcher.job import Job
from launcher.supervisor.environment import StateMemory, agents_environment


def test_each_rank_has_two_slots_until_the_job_ends() -> None:
    memory = StateMemory(3)
    token, pid, *fds = memory.variable.split()
    names = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in fds}
    assert (len(fds), names) == (6, {f"/memfd:{STATE_MEMORY_NAME}-{token} (deleted)"})
    memory.close()
    assert not any(os.path.exists(f"/proc/{pid}/fd/{fd}") for fd in fds)


def test_a_system_that_grants_none_or_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    before, granted = set(os.listdir("/proc/self/fd")), iter([os.memfd_create("x")])

    def create(name: str) -> int:
        for fd in granted:
            return fd
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", create)
    assert StateMemory(2).variable == ""
    assert set(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert StateMemory(257).variable == ""


@pytest.mark.parametrize(("remote_hosts", "found"), [((), None), (("b",), "")])
def test_ranks_on_other_hosts_are_offered_none(remote_hosts: tuple[str, ...], found: str | None) -> None:
    engine = MpichEngine("mpiexec", 2, (), remote_hosts)
    assert agents_environment(Job(module="train", n=2), engine, "here:1", "secret").get(STATE_MEMORY) == found


@pytest.mark.mpi
@pytest.mark.parametrize(("options", "slots"), [((), 0), (("--max-restarts", "1"), 2)])
def test_it_is_there_where_a_restart_may_come(options: tuple[str, ...], slots: int, ddp_launch: Any) -> None:
    around = {**os.environ, STATE_MEMORY: "of a job around this one"}
    body = f"print(len(os.environ[{STATE_MEMORY!r}].split()[2:]))"
    assert ddp_launch(body, n=1, options=options, env=around).stdout == f"{slots}\n"
