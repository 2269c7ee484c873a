"""The connection between keepers and launcher, where the other side, its host or the network has gone."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from launcher.wire import Channel


class Broken(socket.socket):
    """Every use of it ends in one error."""

    code = 0

    def send(self, *args: Any) -> int:
        raise OSError(self.code, "gone")

    def recv(self, *args: Any) -> bytes:
        raise OSError(self.code, "gone")


@pytest.mark.parametrize("name", ["EPIPE", "ECONNRESET", "ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH"])
def test_whatever_ends_the_connection_the_other_side_has_gone(name: str) -> None:
    with Broken() as sock:
        sock.code = getattr(errno, name)
        channel = Channel(sock, trusted=True)
        channel.send({"ping": True})
        assert channel.backlog == 0
        assert channel.receive() is None
