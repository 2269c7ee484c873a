"""The keeper's way to the launcher: by the first of several addresses that answers, and knows the secret of the job."""

from __future__ import annotations

import os
import select
import socket
import time

from launcher.refusal import Refusal
from launcher.wire import Channel, Message, WireError, nonce, proof, proves

# For all addresses together: the launcher answers within milliseconds, unless a thousand keepers call at once (s).
_LIMIT = 20.0
# Where many others connect at once, the launcher may close a connection before it has heard who calls.
_TRIES = 6
_PAUSE = 0.05  # s, and twice as long each time


class Closed(WireError):
    """The other side has closed the connection before it answered."""


def connect(addresses: str, secret: str, identity: Message) -> tuple[Channel, list[Message]]:
    """A connection to the launcher, and what it has said already.

    addresses: "ADDRESS:PORT", or several with commas between them; identity: what the keeper says of its rank
    Raises: Refusal if none of them leads to the launcher, tried again where a connection is closed.
    """
    each = addresses.split(",")
    deadline = time.monotonic() + _LIMIT
    for attempt in range(_TRIES):
        failures, closed = [], False
        for number, address in enumerate(each):
            try:
                # What is left, in equal parts: an address behind a firewall may take all the time that it is given.
                left = max(0.0, deadline - time.monotonic()) / (len(each) - number)
                return _try(address, secret, identity, max(left, _PAUSE))
            except (OSError, WireError) as error:
                failures.append(f"{address} ({getattr(error, 'strerror', None) or error})")
                closed |= isinstance(error, Closed)
        if not closed or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE * 2**attempt)
    me = f"rank {identity['rank']} on {os.uname().nodename}"
    raise Refusal(f"{me} cannot reach the launcher at {' or '.join(failures)}: is there a firewall between them?")


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
                raise WireError("no answer in time")
            news = channel.receive()
            if news is None:
                raise Closed("closed during the handshake")
            for message in news:
                if "challenge" in message:
                    answer = proof(secret, "keeper", str(message["challenge"]))
                    channel.send({"answer": answer, **identity})
            messages += news
        if not proves(next(m["answer"] for m in messages if "answer" in m), secret, "launcher", challenge):
            raise WireError("the other side does not know the secret of this job")
    except BaseException:
        channel.close()
        raise
    return channel, messages
