"""The door of a job: which addresses agents are told, which of them they find, and who is let in."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from collectives.handshake import proof
from launcher import network, protocol
from launcher.errors import StartError
from launcher.protocol import connect
from launcher.supervisor.listener import Listener

ME = {"rank": 3, "size": 4}
LIMIT = 30.0  # s


@contextmanager
def open_door(**options: Any) -> Iterator[tuple[Listener, list[Any]]]:
    """A listener that serves until the block ends, and whom it has let in."""
    listener = Listener(**options)
    agents = []
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            for fileno in select.select([*listener.filenos()], [], [], 0.01)[0]:
                if news := listener.serve(fileno):
                    agents.append(news)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener, agents
    finally:
        done.set()
        thread.join()
        listener.close()
        for channel, _ in agents:
            channel.close()


def stranger(listener: Listener) -> socket.socket:
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT)


@contextmanager
def closed_port() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_a_agent_takes_the_first_address_that_answers() -> None:
    with open_door() as (listener, agents), closed_port() as nobody, socket.create_server(("127.0.0.1", 0)) as other:
        peer = f"127.0.0.1:{other.getsockname()[1]}"  # answers nothing: its part of the time passes
        assert re.fullmatch(r"127\.0\.0\.1:\d+", listener.address)
        channel, _ = connect(f"{nobody},{listener.address},{peer}", listener.secret, ME)
        channel.close()
    assert [hello["rank"] for _, hello in agents] == [3]


def test_a_agent_that_finds_nobody_says_where_it_looked() -> None:
    with closed_port() as first, closed_port() as second:
        text = rf"^rank 3 on \S+ cannot reach the launcher at {first} \(Connection refused\) or {second} \(Connection"
        with pytest.raises(StartError, match=text):
            connect(f"{first},{second}", "secret", ME)


def test_an_agent_that_strangers_drive_out_connects_again(monkeypatch: Any) -> None:
    with open_door() as (listener, agents), ExitStack() as stack:
        listener._max_unauthenticated = 2  # as if there were hundreds of strangers
        places = iter(range(2))

        def slow_proof(secret: bytes, *words: str) -> str:
            """As many strangers as there is room for come before the agent answers for the first time."""
            for _ in places:
                stack.enter_context(stranger(listener)).recv(1)  # it has been accepted
            return proof(secret, *words)

        monkeypatch.setattr(protocol, "proof", slow_proof)
        connect(listener.address, listener.secret, ME)[0].close()
    assert [hello["rank"] for _, hello in agents] == [3]


def test_a_job_with_ranks_elsewhere_is_found_at_every_address_of_this_machine() -> None:
    with open_door(remote_hosts=("192.0.2.1",)) as (listener, agents):
        addresses = listener.address.split(",")
        assert [address.rpartition(":")[0] for address in addresses] == network.addresses(["192.0.2.1"])
        for address in addresses:
            connect(address, listener.secret, ME)[0].close()
    assert len(agents) == len(addresses)


def test_names_of_this_machine_and_of_others() -> None:
    here = ["localhost", "127.0.0.1", "127.0.1.1", socket.gethostname()]
    others = ["192.0.2.1", "no host has such a name", "-oProxyCommand=x"]
    assert [name for name in (*here, *others) if network.is_here(name)] == here


@pytest.mark.parametrize("line", [rb'{"answer":"\ud800"}', b"\xff", b"[" * 4000, b"9" * 5000])
def test_whatever_a_stranger_says_others_are_let_in(line: bytes) -> None:
    with open_door() as (listener, agents):
        with stranger(listener) as peer, suppress(ConnectionResetError):
            peer.sendall(line + b"\n")
            while peer.recv(4096):
                pass  # the challenge, until the connection is closed
        connect(listener.address, listener.secret, ME)[0].close()
    assert len(agents) == 1


def test_another_jobs_agent_is_not_let_in(monkeypatch: Any) -> None:
    monkeypatch.setattr(protocol, "_LIMIT", 0.5)  # s
    with open_door() as (listener, agents), pytest.raises(StartError, match="closed during the handshake"):
        connect(listener.address, "another secret", ME)
    assert not agents
