"""Ranks that no MPI engine has started: they meet by RANK, WORLD_SIZE and MASTER_ADDR, or say who is missing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from collectives.backends.mpi import pmi_server, rendezvous
from collectives.backends.mpi.pmi_server import KeyValueSpace, Server
from collectives.backends.mpi.rendezvous import Rendezvous, addresses, secret
from collectives.errors import WorldError
from collectives.handshake import proof
from collectives.world import World
from tests.conftest import has_mpich, wait_until

HERE = "127.0.0.1"
needs_mpich = pytest.mark.skipif(not has_mpich(), reason="takes MPICH")


def free_port() -> int:
    with socket.create_server((HERE, 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def environ() -> dict[str, str]:
    """What launchers set alike on all ranks; its secret is this test's."""
    return {"MASTER_ADDR": HERE, "MASTER_PORT": str(free_port()), rendezvous.SECRET: uuid.uuid4().hex}


def world(rank: int, size: int, one_host: bool = False) -> World:
    return World("environment", rank, size, rank, size) if one_host else World("environment", rank, size)


@contextlib.contextmanager
def joined(environ: dict[str, str], size: int = 2, one_host: bool = False) -> Iterator[list[Rendezvous]]:
    """The ranks of a job, each a thread of this process until all have come; without MPI."""

    def join(rank: int) -> Rendezvous:
        return Rendezvous(world(rank, size, one_host), 20, environ)

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(join, range(size)))
    try:
        yield ranks
    finally:
        for rank in reversed(ranks):
            rank.leave()


def ask(rank: Rendezvous, line: str) -> str:
    """What the PMI server answers, as MPI asks it."""
    rank._pmi.sendall(line.encode() + b"\n")
    return pmi_server.read_line(rank._pmi, 2.0)


Start = Callable[..., list[CompletedProcess[str]]]


@pytest.fixture
def run_ranks(start_job: Callable[..., Any], environ: dict[str, str]) -> Start:
    """`run_ranks(code, size)` starts plain processes, as launchers do that know nothing of MPI."""

    def run(code: str, size: int, *, ranks: range | None = None, **more: str) -> list[CompletedProcess[str]]:
        jobs = [
            start_job(
                [sys.executable, "-c", code],
                env={**environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **more},
            )
            for rank in ranks or range(size)
        ]
        return [job.wait(timeout=60) for job in jobs]

    return run


def test_where_rank_0_may_be() -> None:
    """Not at the port of the launcher's own store."""
    environ = {"MASTER_ADDR": "node1", "MASTER_PORT": "65534"}
    assert addresses(world(1, 4), environ)[:3] == [("node1", 65535), ("node1", 1024), ("node1", 1025)]
    for wrong in ({"MASTER_ADDR": ""}, {"MASTER_PORT": ""}, {"MASTER_PORT": "http"}):
        with pytest.raises(WorldError, match="MASTER_ADDR and MASTER_PORT must say where rank 0 is"):
            addresses(world(1, 2), {**environ, **wrong})
    with pytest.raises(WorldError, match=r"RANK should be from 0 to 1 \(WORLD_SIZE is 2\), is 2"):
        addresses(world(2, 2), environ)


@pytest.mark.parametrize("name", [rendezvous.SECRET, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"])
def test_what_differs_between_jobs_makes_another_secret(name: str, environ: dict[str, str]) -> None:
    assert secret(world(0, 2), environ) != secret(world(0, 2), {**environ, name: "7"})
    assert secret(world(0, 2), environ) == secret(world(1, 2), {**environ, "MASTER_ADDR": "another-name"})


@pytest.mark.parametrize("address", ["node1", "10.0.0.1"])
def test_ranks_meet_over_a_network_only_with_a_secret_or_if_told_to_trust_it(address: str) -> None:
    environ = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    words = f"rank 1 of 2: .* at {address}, and without a secret .* Set DDP_JOB_SECRET .*, or DDP_TRUST_NETWORK=1"
    for more in ({}, {rendezvous.SECRET: ""}, {rendezvous.TRUST: "0"}):
        with pytest.raises(WorldError, match=words):
            secret(world(1, 2), {**environ, **more})
    keys = [secret(world(1, 2), {**environ, **more}) for more in ({rendezvous.SECRET: "s"}, {rendezvous.TRUST: "1"})]
    assert keys[0] != keys[1]
    for here in ({"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "localhost"}, {}):
        assert secret(world(1, 2, one_host=not here), {**environ, **here})


INIT = "cmd=init pmi_version=1 pmi_subversion=1"


def test_mpi_gets_its_keys_and_its_barrier(environ: dict[str, str]) -> None:
    with joined(environ) as (first, second):
        for rank, line, answer in (
            (first, INIT, "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"),
            (first, "cmd=get_universe_size", "cmd=universe_size rc=0 size=2"),
            (first, "cmd=put kvsname=ddp key=a value=x=y z", "cmd=put_result rc=0 msg=success"),
            (second, "cmd=get kvsname=ddp key=a", "cmd=get_result rc=0 msg=success value=x=y z"),
            (second, "cmd=get kvsname=ddp key=b", "cmd=get_result rc=-1 msg=key_not_found"),
        ):
            assert ask(rank, line) == answer
        assert ask(second, "cmd=publish_name service=s port=p").endswith("rc=-1 msg=not_supported")
        first._pmi.sendall(b"cmd=barrier_in\n")
        assert ask(second, "cmd=barrier_in") == pmi_server.read_line(first._pmi, 2.0) == "cmd=barrier_out rc=0"
    names: list[str] = []
    for _ in range(2):
        KeyValueSpace(2).answer("cmd=get_my_kvsname", names.append)
    assert names[0] != names[1]  # MPICH names a file after it, which ranks of two jobs must not share


def test_strangers_neither_join_nor_break_the_job(environ: dict[str, str]) -> None:
    port = int(environ["MASTER_PORT"])
    with contextlib.ExitStack() as stack:
        # One has the first place, and answers nothing; one the second, and answers nonsense.
        silent = stack.enter_context(socket.create_server((HERE, port + 1)))
        silent.listen(0)
        loud = stack.enter_context(socket.create_server((HERE, port + 2)))

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with loud.accept()[0] as caller:
                        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        speaker = threading.Thread(target=speak)
        speaker.start()
        first: list[Rendezvous] = []
        thread = threading.Thread(target=lambda: first.append(Rendezvous(world(0, 2), 30, environ)))
        thread.start()
        strangers = []
        deadline = time.monotonic() + 20
        while len(strangers) < 200:
            assert time.monotonic() < deadline
            try:
                strangers.append(stack.enter_context(socket.create_connection((HERE, port + 3), 5)))
            except ConnectionRefusedError:  # rank 0 is not there yet
                time.sleep(0.02)
                continue
            with contextlib.suppress(OSError):  # the server has closed it already
                said = [b"", b"control 1 x y\n", b"\xff" * 4096, b"cmd=put key=a value=b\n"][len(strangers) % 4]
                strangers[-1].sendall(said)
        second = Rendezvous(world(1, 2), 30, environ)
        thread.join(30)
        assert ask(second, "cmd=get kvsname=ddp key=a") == "cmd=get_result rc=-1 msg=key_not_found"
        assert first[0].died() == second.died() == set()
        second.leave()
        first[0].leave()
        loud.shutdown(socket.SHUT_RDWR)
        speaker.join(10)


@contextlib.contextmanager
def served(secret: bytes) -> Iterator[Any]:
    """The address of a PMI server for two ranks, which runs in a thread of this process."""
    listener = socket.create_server((HERE, 0), backlog=128)
    server = Server(listener, secret, 2, os.getppid())
    serving = threading.Thread(target=server.serve)
    serving.start()
    try:
        yield listener.getsockname()
    finally:
        server._over.set()
        serving.join(10)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_slow_strangers_keep_no_rank_out() -> None:
    with served(b"secret") as address, contextlib.ExitStack() as stack:
        for _ in range(pmi_server._UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(address, 5)).sendall(b"control")
        rank = stack.enter_context(socket.create_connection(address, 5))
        challenge = pmi_server.read_line(rank, 2.0).split()[1]
        rank.sendall(f"control 1 x {proof(b'secret', 'rank', 'control', '1', 'x', challenge)}\n".encode())
        assert pmi_server.read_line(rank, 2.0) == f"{proof(b'secret', 'server', 'x')} welcome"
        assert pmi_server.read_line(rank, 2.0) == "missing 0"


def test_a_stranger_has_one_time_limit_however_often_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmi_server, "_HANDSHAKE", 0.3)
    with served(b"secret") as address, socket.create_connection(address, 0.1) as stranger:
        assert pmi_server.read_line(stranger, 2.0).startswith(pmi_server.BANNER)
        deadline = time.monotonic() + 5
        with contextlib.suppress(ConnectionError):  # it has been dropped
            while time.monotonic() < deadline:
                stranger.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < deadline


def test_a_server_that_has_lost_rank_0_accepts_no_rank_of_a_restart() -> None:
    listener = socket.create_server((HERE, 0))
    address = listener.getsockname()
    server = Server(listener, b"", 2, parent=0)
    serving = threading.Thread(target=server.serve)
    serving.start()
    time.sleep(2 * pmi_server._POLL)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5).close()
    serving.join(10)


def test_a_rank_with_another_secret_is_told_what_must_be_the_same(environ: dict[str, str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Rendezvous, world(0, 2), 2.0, environ)
        second = pool.submit(Rendezvous, world(1, 2), 1.5, {**environ, rendezvous.SECRET: "guessed"})
        with pytest.raises(WorldError, match=r"rank 0 of 2: rank 1 did not come within 2 s"):
            first.result()
        with pytest.raises(WorldError, match=r"rank 1 of 2 has not found rank 0 .*no answer of ours.*SECRET"):
            second.result()


def test_all_that_wait_learn_who_is_missing(environ: dict[str, str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(Rendezvous, world(rank, 4), limit, environ) for rank, limit in ((0, 4.0), (2, 60.0))]
        with pytest.raises(WorldError, match="rank 0 of 4: ranks 1, 3 did not come within 4 s"):
            waiting[0].result()
        with pytest.raises(WorldError, match="rank 2 of 4: rank 0 ended while ranks were joining; ranks 1, 3 had not"):
            waiting[1].result()


def test_two_processes_are_not_one_rank_and_whoever_dies_is_named_and_ends_what_waits_in_mpi(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TAKEN", 0.2)
    with joined(environ, 3, one_host=True) as ranks:
        with pytest.raises(WorldError, match="rank 1 of 3 has joined already: RANK must be another"):
            Rendezvous(world(1, 3, one_host=True), 20, environ)
        ranks[0]._pmi.sendall(b"cmd=barrier_in\n")
        ranks[1]._control.close()  # type: ignore[union-attr]  # as its death does
        assert pmi_server.read_line(ranks[0]._pmi, 2.0).startswith("cmd=barrier_out rc=-1")
        wait_until(lambda: ranks[0].died() == ranks[2].died() == {1})


SUM = (
    "import os, numpy as np, collectives\n"
    "comm = collectives.init(timeout=40)\n"
    "print(comm.rank, comm.size, comm.local_rank, comm.all_reduce(np.array([comm.rank + 1.0])))\n"
    "assert not [name for name in os.environ if name.startswith('PMI_')]\n"
)


@pytest.mark.mpi
@needs_mpich
def test_plain_processes_become_one_world(run_ranks: Start) -> None:
    done = run_ranks(SUM, 2)  # on one host by their own account: test_world.py
    assert [(each.returncode, each.stdout) for each in done] == [(0, "0 2 0 [3.]\n"), (0, "1 2 1 [3.]\n")], done


@pytest.mark.mpi
@needs_mpich
@pytest.mark.parametrize(
    ("victim", "end", "status", "others", "says"),
    [
        (0, "os.kill(os.getpid(), 9)", -signal.SIGKILL, 1, "rank 0 has ended without leaving (killed?) while"),
        (1, "sys.exit(3)", 3, 3, "rank 1 has failed (exit status 3)"),
    ],
    ids=["killed", "failed"],
)
def test_the_end_of_a_rank_ends_the_others(
    victim: int, end: str, status: int, others: int, says: str, run_ranks: Start
) -> None:
    code = (
        "import os, sys, numpy as np, collectives\n"
        "comm = collectives.init(timeout=60)\n"
        f"if comm.rank == {victim}: {end}\n"
        "comm.all_reduce(np.ones(1))\n"
    )
    done = run_ranks(code, 2, LOCAL_WORLD_SIZE="2")
    assert (done[victim].returncode, done[1 - victim].returncode) == (status, others)
    assert says in done[1 - victim].stderr


@pytest.mark.mpi
@needs_mpich
def test_an_mpi_that_has_begun_alone_is_an_error(run_ranks: Start) -> None:
    code = "from mpi4py import MPI; import collectives; collectives.init(timeout=20)"
    done = run_ranks(code, 2, ranks=range(1, 2))
    assert "call collectives.init() before anything imports mpi4py.MPI" in done[0].stderr


@pytest.mark.mpi
@pytest.mark.skipif(has_mpich(), reason="takes Open MPI")
def test_open_mpi_says_how_its_ranks_are_started(run_ranks: Start) -> None:
    done = run_ranks("import collectives; collectives.init(timeout=20)", 2, ranks=range(1, 2))
    assert done[0].returncode == 1
    assert "Open MPI takes ddp-launch or mpiexec" in done[0].stderr


@pytest.mark.mpi
@pytest.mark.long
@needs_mpich
def test_torchrun_starts_ranks_and_restarts_them(run_job: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, numpy as np, collectives\n"
        "comm = collectives.init(timeout=40)\n"
        "start = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if (start, comm.rank) == (0, 1): os.kill(os.getpid(), 9)\n"
        "total = comm.all_reduce(np.array([comm.rank + 1.0]))\n"
        f"open(r'{tmp_path}/' + str(comm.rank), 'w').write(f'{{start}} {{comm.size}} {{total}}')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    run_job([*torchrun, str(script)], timeout=100, code=0)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1 2 [3.]"] * 2


@pytest.mark.parametrize("python", ["/bin/false", "/no/python"])
def test_a_server_that_does_not_start_is_an_error(
    python: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(WorldError, match=r"rank 0 cannot start its PMI server|rank 0's PMI server ended at once"):
        Rendezvous(world(0, 2), 60, environ)
