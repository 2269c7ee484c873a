"""How a rank waits for others: spinning, then sleeping, and when it has waited in vain.

Ranks may share cores with each other, and with processes that compute. So a waiting rank spins for a moment, gives its
core to whoever can use it for a little longer, and then sleeps between looks. Nothing blocks inside a backend, so that
time limits, Ctrl-C and the end of another rank reach every wait.
"""

from __future__ import annotations

import os
import time
from typing import Any

from collectives.engine.call import CollectiveOp
from collectives.errors import CollectiveTimeout, PeerLeft
from collectives.flight.words import describe_process, on_communicator
from collectives.time_limit import TimeLimit
from collectives.transport import Test, Transport, describe_exits, left_before, spans

# All in seconds.
# A peer that is about to arrive is worth a short spin.
_SPIN = 20e-6
# Until then a rank yields its core between looks: another rank may need it.
_YIELD = 300e-6
# A sched_yield that takes longer than this means that the core is shared: for a while waiting ranks spin no longer.
_SHARED = 5e-6
# One that takes longer than this gave the core to a process that computes, for a whole time slice. Who sleeps gets the
# core back at once, so for a while waiting ranks sleep instead (benchmarks/collectives.py --busy 1).
_TAKEN = 200e-6
# How long a while is.
_CROWDED = 5e-3
# The shortest sleep: the system makes about 55 us of it.
_NAP = 1e-6
# Between looks of a rank that has waited longer than _YIELD. Longer sleeps save a little of the core, and where that is
# busy they cost much of the wire's bandwidth (benchmarks/overlap.py).
PAUSE = 100e-6
# The same for a call that no thread waits for yet, while the program computes: each look costs the core some 10 us, and
# the bandwidth that is lost at the end of the wait is hidden by computing. Shorter than _YIELD, so that ranks of a node
# that look in turns meet.
LONG_PAUSE = 250e-6

_SHOWN = 8  # late ranks of which a timeout says what they do
_ORDER = "Every rank must make the same calls in the same order"

_shared_until = _crowded_until = 0.0


def spin(test: Test) -> bool:
    """Repeats a test for a fraction of a millisecond; False if it is not True by then."""
    global _shared_until, _crowded_until
    start = now = time.monotonic()
    while now - start < _YIELD:
        if now - start < (_SPIN if now >= _shared_until else _SHARED):
            pass
        elif now < _crowded_until:
            time.sleep(_NAP)
        else:
            os.sched_yield()
            taken = time.monotonic() - now
            if taken > _SHARED:
                _shared_until = now + _CROWDED
            if taken > _TAKEN:
                _crowded_until = now + _CROWDED
        if test():
            return True
        now = time.monotonic()
    return False


def check_wait(call: CollectiveOp[Any], transport: Transport) -> None:
    """Looks at a call whose test has not been True for a while.

    Raises: PeerLeft if a rank that it waits for has left; CollectiveTimeout if the time limit of this step has passed.
    """
    what = f"{call}{on_communicator(transport.label)}"
    exit_notices = transport.exit_notices()
    if exit_notices:
        if call.gone is not None:
            gone = call.gone(exit_notices)
        else:
            gone = left_before(exit_notices, transport.key, call.number)
        # Tested again: what it sent before it left may have arrived just before the notice.
        if gone and not (call.test is not None and call.test()):
            raise PeerLeft(f"{describe_exits(exit_notices, gone)} while rank {transport.rank} waits in {what}")
    if call.limit is None:
        call.limit = TimeLimit(call.timeout)
    elif call.limit.passed():
        late = describe_late(call, transport)
        raise CollectiveTimeout(f"rank {transport.rank}: {what} was not complete after {call.timeout:g} s. {late}")


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
