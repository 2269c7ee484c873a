"""Limits of open files: the launcher takes what it may have, ranks find the user's, unauthenticated cost no job."""

from __future__ import annotations

import resource
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.linux import many_files

LIMIT = resource.RLIMIT_NOFILE


def test_the_limit_is_raised_and_restored_and_more_ranks_than_files_are_refused() -> None:
    before = resource.getrlimit(LIMIT)
    with many_files(1) as files:
        assert (files, resource.getrlimit(LIMIT)) == (before[0], (before[1], before[1]))
    words = rf"^{before[1]} ranks need more open files than this process may have: {before[1]} \(ulimit -n\)$"
    with pytest.raises(UsageError, match=words), many_files(before[1]):
        pass
    assert resource.getrlimit(LIMIT) == before


@pytest.mark.mpi
def test_more_ranks_than_the_soft_limit_has_files_which_ranks_find(run_job: Any, script: Any) -> None:
    path = script("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    command = f"ulimit -Sn 20; ulimit -Hn 400; exec {sys.executable} -m launcher -n 16 {path}"
    assert run_job(["bash", "-c", command], code=0, err="").stdout.count(": 20 400") == 16


def test_a_crowd_of_strangers_costs_no_job(start_job: Any, script: Any, tmp_path: Path) -> None:
    path = script(
        r"""
        agent = open(f"/proc/{os.getppid()}/environ").read().split("\0")
        print(dict(each.split("=", 1) for each in agent if each)["DDP_LAUNCH_ADDRESS"], flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        """
    )
    command = f"ulimit -n 64; ulimit -Sn 48; exec {sys.executable} -m launcher {path} {tmp_path}/go"
    job = start_job(["sh", "-c", command])
    host, _, port = job.process.stdout.readline().strip().rpartition(":")
    with ExitStack() as stack:
        for _ in range(80):
            peer = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        peer.sendall(rb'{"answer":"\ud800"}' + b"\n")
        while peer.recv(4096):
            pass  # the challenge
        (tmp_path / "go").touch()
        job.wait(30, code=0, out="", err="")
