"""Waiting: how long a rank spins, yields and sleeps between two tests of a step, and what ends a wait.

Nothing here blocks inside a backend: a test is repeated until it is True, the time limit passes, Ctrl-C arrives or a
rank turns out to have left.
"""

from __future__ import annotations

import os
import time
from typing import Any

from collectives import exit_notice
from collectives.engine.call import CollectiveOp
from collectives.engine.verify import spans
from collectives.errors import CollectiveTimeout, PeerLeft
from collectives.flight.reader import describe_process
from collectives.time_limit import TimeLimit
from collectives.transport import Test, Transport

_SPIN = 5e-6  # s; a peer that is about to arrive is worth a short spin,
_YIELD = 300e-6  # s; a later one gets this core whenever it can use it: ranks may share one,
# s; and a yield that takes longer gave the core to a process that computes, and did so for a whole time slice. A
# process that sleeps gets its core back at once, so that for a while waiting ranks sleep instead
# (benchmarks/collectives.py --busy 1).
_TAKEN = 200e-6
_CROWDED = 5e-3
_NAP = 1e-6  # s; the system makes about 55 us of it
# s; and one that is still later may be computing on it. Longer sleeps save a little of the core, and where that is busy
# they cost much of the wire's bandwidth (benchmarks/overlap.py).
PAUSE = 100e-6
# s; the same for a call that no thread waits for yet, as the program computes: each test costs the core some 10 us, and
# at the end of the wait some bandwidth is lost that computing hides. Shorter than _YIELD, so that ranks of a node that
# test in turns meet.
LONG_PAUSE = 250e-6
_SHOWN = 8  # late ranks of which a timeout says what they do
_ORDER = "Every rank must make the same calls in the same order"

_crowded_until = 0.0


def spin(test: Test) -> bool:
    """Repeats a test for a fraction of a millisecond; False if it is not True by then."""
    global _crowded_until
    start = now = time.monotonic()
    while now - start < _YIELD:
        if now - start < _SPIN:
            pass
        elif now < _crowded_until:
            time.sleep(_NAP)
        else:
            os.sched_yield()
            if time.monotonic() - now > _TAKEN:
                _crowded_until = now + _CROWDED
        if test():
            return True
        now = time.monotonic()
    return False


def check_wait(call: CollectiveOp[Any], transport: Transport) -> None:
    """Looks at a call whose test has not been True for a while.

    Raises: PeerLeft if a rank that it waits for has left; CollectiveTimeout if the time limit of this step has passed.
    """
    exit_notices = transport.exit_notices()
    if exit_notices:
        if call.gone is not None:
            gone = call.gone(exit_notices)
        else:
            gone = exit_notice.left_before(exit_notices, transport.key, call.number)
        # Tested again: what it sent before it left may have arrived just before the notice.
        if gone and not (call.test is not None and call.test()):
            raise PeerLeft(f"{exit_notice.describe(exit_notices, gone)} while rank {transport.rank} waits in {call}")
    if call.limit is None:
        call.limit = TimeLimit(call.timeout)
    elif call.limit.passed():
        late = describe_late(call, transport)
        raise CollectiveTimeout(f"rank {transport.rank}: {call} was not complete after {call.timeout:g} s. {late}")


def describe_late(call: CollectiveOp[Any], transport: Transport) -> str:
    """Names the ranks that are late for a call, as far as this rank knows, and the last call of those on its node."""
    late = list(transport.late() if call.peers is None else call.peers)
    if not late:
        return f"{_ORDER}; one has not arrived, or hangs elsewhere"
    missed = "arrived" if call.peers is None else "made the call that it answers"
    head = f"{'Rank' if len(late) == 1 else 'Ranks'} {spans(late)} {'has' if len(late) == 1 else 'have'} not {missed}"
    processes = {rank: pid for rank in late[:_SHOWN] if (pid := transport.pid(rank)) is not None}
    lines = [f"\n  rank {rank} (pid {pid}): {describe_process(pid)}" for rank, pid in processes.items()]
    return f"{head}:{''.join(lines)}\n  {_ORDER}." if lines else f"{head}. {_ORDER}"
