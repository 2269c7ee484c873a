"""Protocol between launcher and agents: JSON lines on a TCP socket, opened by a mutual challenge.

Both sides prove that they hold the job's secret without ever sending it, so that an unauthenticated peer that finds the
port can neither feed the launcher nor command a rank. Bytes that ranks wrote travel as text with `surrogateescape`.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import sys
import time

from launcher.errors import StartError

TYPE_CHECKING = False  # not of `typing`, whose import would cost every agent a tenth of its memory
if TYPE_CHECKING:
    from typing import Any

#: The environment of an agent: where the launcher listens, and the secret of the job.
ADDRESS = "DDP_LAUNCH_ADDRESS"
SECRET = "DDP_LAUNCH_SECRET"
#: The pid of the launcher, above which an agent knows that it stands where a reaper of the launcher's is.
LAUNCHER_PID = "DDP_LAUNCH_PID"

#: How many files the ranks on the launcher's host may open (soft limit): the launcher and the engine need more.
FILES = "DDP_LAUNCH_FILES"

#: What a peer may send before it has shown that it knows the secret.
UNAUTHENTICATED_LIMIT = 4096
_CHUNK = 1 << 16

Message = dict[str, "Any"]


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def nonce() -> str:
    """A random number, good for one challenge or as the secret of one job."""
    return os.urandom(32).hex()


def proof(secret: str, role: str, challenge: str) -> str:
    """What only who knows the secret can answer to `challenge`; `role` keeps answers from being played back."""
    # An unauthenticated peer's challenge, or answer, may be what JSON can hold and UTF-8 cannot.
    return hmac.digest(secret.encode(), f"{role} {challenge}".encode("utf-8", "surrogatepass"), "sha256").hex()


def is_proof(answer: object, secret: str, role: str, challenge: str) -> bool:
    """True if `answer` is the proof."""
    if not isinstance(answer, str):
        return False
    return hmac.compare_digest(answer.encode("utf-8", "surrogatepass"), proof(secret, role, challenge).encode())


def to_text(data: bytes) -> str:
    """Bytes as a JSON string can carry them."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """Undoes `to_text`. Another text may hold what no bytes are: it is written as Python does, \\ud800."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def type_and_value(message: Message) -> tuple[str, Any]:
    """A message's first key is its type; what it holds there is the value.

    >>> type_and_value({"end": 0, "deserted": False})
    ('end', 0)
    """
    return next(iter(message.items()), ("", None))


class Channel:
    """One end of the connection: whole messages in and out of a nonblocking socket.

    trusted: False while the other side may be a peer, of whom no more than a handshake is read
    """

    def __init__(self, sock: socket.socket, trusted: bool) -> None:
        sock.setblocking(False)
        # Small messages that must not wait for each other: an exit status is worth a packet of its own.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.trusted = trusted
        self._in = bytearray()
        self._allowed = UNAUTHENTICATED_LIMIT  # bytes to read while it is not trusted
        self._out = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._out)

    def send(self, message: Message) -> None:
        """Queues a message and sends what the socket takes now; `flush` sends the rest."""
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now. A peer that has gone is noticed by `receive`, not here."""
        while self._out:
            try:
                sent = self.socket.send(self._out[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                return
            del self._out[:sent]

    def unacknowledged(self) -> float:
        """For how many seconds the other machine has acknowledged nothing of what was sent to it, 0.0 while it does.

        A machine acknowledges what comes for a process that is stopped, too: what this tells apart is a network that is
        down.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)  # struct tcp_info of linux/tcp.h
        probes = info[3]  # while the other side has no room for more, and so nothing is on its way
        on_its_way, since = (int.from_bytes(info[at : at + 4], sys.byteorder) for at in (24, 56))  # ms
        return since / 1000 if on_its_way or probes > 1 else 0.0

    def receive(self) -> list[Message] | None:
        """The messages that are complete now; None once the other side has closed, or nothing leads to it any more.

        Raises: ProtocolError if they are none of ours.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:  # reset, timed out, no route to it: all the same to us
            return None
        if not data:
            return None
        start = len(self._in)
        self._in += data
        if not self.trusted:
            self._allowed -= len(data)
            if self._allowed < 0:
                raise ProtocolError("too much before the handshake")
        end = self._in.rfind(b"\n", start)
        if end < 0:
            return []
        lines = bytes(self._in[:end]).split(b"\n")
        del self._in[: end + 1]
        return [_parse(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("not a message")
    return message


# For all addresses together: the launcher answers within milliseconds, unless a thousand agents call at once (s).
_LIMIT = 20.0
_SHORTEST = 0.05  # s
_PAUSE = 0.1  # s


def connect(addresses: str, secret: str, identity: Message) -> tuple[Channel, list[Message]]:
    """A connection to the launcher, and the messages that it has sent already.

    addresses: "ADDRESS:PORT", or several with commas between them; identity: the agent's first message
    Raises: StartError if no address leads to the launcher: at once if none accepts a connection, else after 20 s, since
        a launcher that strangers flood with connections drops those of agents, too.
    """
    each = addresses.split(",")
    deadline = time.monotonic() + _LIMIT
    while True:
        failures = []
        dropped = False
        for number, address in enumerate(each):
            try:
                # What is left, in equal parts: an address behind a firewall may take all the time that it is given.
                left = (deadline - time.monotonic()) / (len(each) - number)
                return _try(address, secret, identity, max(left, _SHORTEST))
            except (OSError, ProtocolError) as error:
                dropped |= isinstance(error, ProtocolError)
                failures.append(f"{address} ({getattr(error, 'strerror', None) or error})")
        if not dropped or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE)
    me = f"rank {identity['rank']} on {os.uname().nodename}"
    raise StartError(f"{me} cannot reach the launcher at {' or '.join(failures)}: is there a firewall between them?")


def _try(address: str, secret: str, identity: Message, limit: float) -> tuple[Channel, list[Message]]:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + limit
    channel = Channel(socket.create_connection((host.strip("[]"), int(port)), timeout=limit), trusted=True)
    try:
        challenge = nonce()
        channel.send({"challenge": challenge})
        messages: list[Message] = []
        while not any("answer" in message for message in messages):
            if not select.select([channel], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ProtocolError("no answer in time")
            received = channel.receive()
            if received is None:
                raise ProtocolError("closed during the handshake")
            for message in received:
                if "challenge" in message:
                    answer = proof(secret, "agent", str(message["challenge"]))
                    channel.send({"answer": answer, **identity})
            messages += received
        if not is_proof(next(m["answer"] for m in messages if "answer" in m), secret, "launcher", challenge):
            raise ProtocolError("the other side does not know the secret of this job")
    except BaseException:
        channel.close()
        raise
    return channel, messages
