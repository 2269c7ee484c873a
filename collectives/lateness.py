"""Whom a call waited for when its time was over, and what those did instead: the part of a timeout that helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from collectives.meeting import spans
from collectives.transport import Transport

_SHOWN = 8  # ranks
_ORDER = "Every rank must make the same calls in the same order"


class Waiting(Protocol):
    """What is asked of a call: see `Call`."""

    @property
    def number(self) -> int: ...
    @property
    def peers(self) -> Sequence[int] | None: ...


def explain(transport: Transport, call: Waiting) -> str:
    """Who has not come to a call that this rank waits in, or not done its part, with a line on each of them."""
    late = list(transport.late() if call.peers is None else call.peers)
    accounts = transport.accounts(late or [rank for rank in range(transport.size) if rank != transport.rank])
    if not late:  # the transport cannot tell; who has begun fewer calls is late
        late = [rank for rank, account in accounts.items() if account.begun is None or account.begun <= call.number]
    if call.peers is not None:
        head = f"{_has(late)}not made the call that it answers"
    elif late:
        come = all(rank in accounts and (accounts[rank].begun or 0) > call.number for rank in late)
        head = _has(late) + ("come to it, but not done what it waits for" if come else "not arrived")
    elif accounts:
        late, head = list(accounts), "Every rank has come to it, but what they send does not arrive"
    else:
        return f"{_ORDER}; one has not arrived, or hangs elsewhere"
    lines = []
    for rank in late[:_SHOWN]:
        if rank in accounts:
            account = accounts[rank]
            who = f" ({account.who})" if account.who else ""
            lines.append(f"\n  rank {rank}{who}: {account.words}")
    if not lines:
        return f"{head}. {_ORDER}"
    if len(late) > _SHOWN:
        lines.append(f"\n  and {len(late) - _SHOWN} more")
    return f"{head}:{''.join(lines)}\n  {_ORDER}."


def _has(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]} has " if len(ranks) == 1 else f"Ranks {spans(ranks)} have "
