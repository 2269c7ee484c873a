"""The connection between keepers and launcher, where the other side, its host or the network has gone."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from launcher.wire import Channel, WireError, nonce, proof, proves, to_bytes, to_text


class Broken(socket.socket):
    """Every use of it ends in one error."""

    code = 0

    def send(self, *args: Any) -> int:
        raise OSError(self.code, "gone")

    def recv(self, *args: Any) -> bytes:
        raise OSError(self.code, "gone")


class Deaf(socket.socket):
    """Not of TCP."""

    def setsockopt(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("name", ["EPIPE", "ECONNRESET", "ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH"])
def test_whatever_ends_the_connection_the_other_side_has_gone(name: str) -> None:
    with Broken() as sock:
        sock.code = getattr(errno, name)
        channel = Channel(sock, trusted=True)
        channel.send({"ping": True})
        assert channel.backlog == 0
        assert channel.receive() is None


def test_an_answer_that_no_bytes_can_stand_for_proves_nothing() -> None:
    challenge = nonce()
    assert proves(proof("secret", "keeper", challenge), "secret", "keeper", challenge)
    for answer in ("\ud800", "é", "", None, 7):
        assert not proves(answer, "secret", "keeper", challenge)
    assert proof("secret", "keeper", "\ud800") != proof("secret", "keeper", "")


def test_a_stranger_is_not_listened_to_for_long() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(Deaf(fileno=ours.detach()), trusted=False)
        line = b'{"%d":0}' + b" " * 1000 + b"\n"
        for number in range(4):
            theirs.sendall(line % number)
            assert channel.receive() == [{str(number): 0}]
        theirs.sendall(line % 4)
        with pytest.raises(WireError, match="too much before the handshake"):
            channel.receive()
        channel.close()


def test_text_that_no_bytes_have_become_is_written_as_python_writes_it() -> None:
    assert to_bytes(to_text(b"caf\xe9 \xc3\xa9")) == b"caf\xe9 \xc3\xa9"
    assert to_bytes("bad \ud800 \u00e9") == b"bad \\ud800 \xc3\xa9"
