"""What a rank did last, as another rank can learn it: out of its flight record, whether it still reacts or not."""

from __future__ import annotations

import time
from typing import NamedTuple

from collectives.errors import RecordError
from collectives.flight.layout import clip
from collectives.flight.reader import read
from collectives.flight.report import FlightRecord, describe_last

_WORDS = 1500  # bytes: an answer over MPI must arrive in one piece
_OLD = int(3e9)  # ns; samples are taken once a second
_KEY = 112  # bytes that a flight record keeps of a communicator's key

# They are counted on lines of their own.
_PAIRS = ("send", "recv", "create_group")


class Account(NamedTuple):
    """What is known of a rank.

    begun: how many collectives of the communicator in question it has begun; None: not known
    who: `pid 4711 on node7`; words: what it did last, or why that is not known
    """

    begun: int | None
    who: str
    words: str

    def of_world(self, rank: int) -> Account:
        """The same, for a communicator in which the rank has another number than in the world."""
        return self._replace(who=", ".join(part for part in (f"rank {rank} of the world", self.who) if part))


def give_account(record: FlightRecord, communicator: str, now: int) -> Account:
    """The account that a flight record gives. now: of the monotonic clock of its machine, ns"""
    key = clip(communicator, _KEY)
    begun = [
        call.number
        for call in record.calls
        if call.communicator == key and call.state != "queued" and call.name not in _PAIRS
    ]
    return Account(max(begun, default=-1) + 1, f"pid {record.pid}", clip(describe_last(record, now), _WORDS))


def look_up(pid: int, rank: int, communicator: str) -> Account:
    """The account of a rank of the world that is a process of this machine. Raises: RecordError if it has none."""
    record = read(pid)
    if record.rank != rank:  # in a container of its own, another process has that pid
        raise RecordError(f"process {pid} is not rank {rank}")
    now = time.monotonic_ns()
    account = give_account(record, communicator, now)
    if _stopped(pid):
        return account._replace(words=f"stopped by a signal or a debugger; {account.words}")
    if record.position is not None and now - record.position.time > _OLD:
        return account._replace(words=f"{account.words}, with no sample since: the GIL is held")
    return account


def _stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
