"""The connection between agents and launcher, where the other side, its host or the network has gone."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from launcher.protocol import Channel, ProtocolError, to_bytes, to_text

# In a network of its own, whose only interface is switched off: nothing is acknowledged any more.
CUT = """
import socket, subprocess, sys, time
from launcher.protocol import Channel

def interface(state):
    subprocess.run([sys.argv[1], "link", "set", "lo", state], check=True)

def becomes(channel, cut):
    deadline = time.monotonic() + 10
    while (channel.unacknowledged() > 1.0) != cut:
        assert time.monotonic() < deadline, channel.unacknowledged()
        channel.send({"beat": 1})
        time.sleep(0.1)

interface("up")
with socket.create_server(("127.0.0.1", 0)) as listener:
    # The other side takes nothing, as a launcher that is stopped: first a little room is left, then none.
    idle, full = (Channel(socket.create_connection(listener.getsockname()), trusted=True) for _ in range(2))
    full.send({"out": "x" * (64 << 20)})
    assert full.backlog > 0
    idle.send({"beat": 1})
    time.sleep(1.5)
    for channel in (idle, full):
        assert channel.unacknowledged() == 0.0, channel.unacknowledged()
    interface("down")
    for channel in (idle, full):
        becomes(channel, True)
    interface("up")
    becomes(idle, False)
"""


def test_a_stopped_process_acknowledges_what_is_sent_and_a_cut_network_does_not(run_in_own_network: Any) -> None:
    run_in_own_network(CUT)


class NotTcp(socket.socket):
    """A socket without the options of TCP."""

    def setsockopt(self, *args: Any) -> None:
        pass


def test_an_unauthenticated_peer_may_send_little() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(NotTcp(fileno=ours.detach()), trusted=False)
        line = b'{"%d":0}' + b" " * 1000 + b"\n"
        for number in range(4):
            theirs.sendall(line % number)
            assert channel.receive() == [{str(number): 0}]
        theirs.sendall(line % 4)
        with pytest.raises(ProtocolError, match="too much before the handshake"):
            channel.receive()
        channel.close()


def test_text_that_no_bytes_have_become_is_written_as_python_writes_it() -> None:
    assert to_bytes(to_text(b"caf\xe9 \xc3\xa9")) == b"caf\xe9 \xc3\xa9"
    assert to_bytes("bad \ud800 \u00e9") == b"bad \\ud800 \xc3\xa9"
