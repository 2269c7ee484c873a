"""The door of a job: keepers are let in once they have shown that they know its secret, strangers are dropped."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

from launcher.wire import Channel, Message, WireError, nonce, proof, proves

# A keeper answers within milliseconds; who says nothing for so long (seconds) is none.
_LIMIT = 10.0
# All keepers of a large job call at once.
_BACKLOG = 1024


class Reception:
    """Listens on a free port: for nobody outside this machine, unless the job has ranks elsewhere.

    elsewhere: names of other hosts from which keepers will call
    address: "ADDRESS:PORT", or several with commas between them, the likeliest first
    secret: of this job, for its keepers alone
    """

    def __init__(self, elsewhere: Sequence[str] = ()) -> None:
        self.secret = nonce()
        if elsewhere:
            from launcher import route

            self._listener = _everywhere()
            addresses = [f"[{each}]" if ":" in each else each for each in route.addresses(elsewhere)]
        else:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            addresses = ["127.0.0.1"]
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = ",".join(f"{each}:{port}" for each in addresses)
        self._strangers: dict[int, _Stranger] = {}

    def filenos(self) -> Iterator[int]:
        """What to wait for."""
        yield self._listener.fileno()
        yield from self._strangers

    @property
    def deadline(self) -> float:
        """When `drop_silent` has something to do."""
        return min((stranger.until for stranger in self._strangers.values()), default=float("inf"))

    def serve(self, fileno: int) -> tuple[Channel, Message] | None:
        """Deals with what has come on `fileno`; a keeper that has proved itself, and what it says of its rank."""
        if fileno == self._listener.fileno():
            self._accept()
            return None
        stranger = self._strangers[fileno]
        try:
            messages = stranger.channel.receive()
        except WireError:
            messages = None
        for message in messages or []:
            stranger.said |= message
        if messages is not None and "answer" not in stranger.said:
            return None  # not done yet
        del self._strangers[fileno]
        if messages is None or not proves(stranger.said["answer"], self.secret, "keeper", stranger.challenge):
            stranger.channel.close()
            return None
        stranger.channel.trusted = True
        stranger.channel.send({"answer": proof(self.secret, "launcher", str(stranger.said.get("challenge")))})
        return stranger.channel, stranger.said

    def drop_silent(self, now: float) -> None:
        """Closes the connections of those who have said nothing for too long."""
        for fileno, stranger in list(self._strangers.items()):
            if stranger.until <= now:
                del self._strangers[fileno]
                stranger.channel.close()

    def close(self) -> None:
        self._listener.close()
        self.drop_silent(float("inf"))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller has gone again
        stranger = _Stranger(Channel(sock, trusted=False))
        self._strangers[sock.fileno()] = stranger
        stranger.channel.send({"challenge": stranger.challenge})


def _everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


class _Stranger:
    """Somebody who has connected and not yet shown that it is one of our keepers."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.challenge = nonce()
        self.until = time.monotonic() + _LIMIT
        self.said: Message = {}
