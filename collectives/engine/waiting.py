"""How a rank waits for others: by tests in a loop, with longer pauses as time passes, until a time limit has passed.

Ranks may share cores with each other, and with processes that compute. So a waiting rank spins for a moment, then
yields its core between tests, and then sleeps between them. Nothing blocks inside a backend, so time limits, Ctrl-C and
the exit of another rank end every wait.
"""

from __future__ import annotations

import os
import time
from typing import Any

from collectives.engine.call import CollectiveOp
from collectives.errors import CollectiveTimeout, PeerLeft, ranks_with_verb
from collectives.flight.reader import describe_process, on_communicator
from collectives.time_limit import Deadline
from collectives.transport import Test, Transport, describe_exits, left_before

# All times are in seconds.
# Test without a pause for this long, since a peer may be about to arrive.
_SPIN = 20e-6
# Until this much time has passed, yield the core between tests: another rank may need it. Then sleep.
_YIELD = 300e-6
# A sched_yield that takes longer than this means that the core is shared. For a while, this rank then tests without a
# pause only for this long, and not for _SPIN.
_SHARED = 5e-6
# A sched_yield that takes longer than this gave the core to a computing process for a whole time slice. A sleeping
# process gets its core back at once when it wakes. So for a while, this rank then sleeps instead of yielding
# (benchmarks/collectives.py --busy 1).
_TAKEN = 200e-6
# How long this rank spins less, or sleeps instead of yielding, after a sched_yield longer than _SHARED or _TAKEN.
_CROWDED = 5e-3
# The shortest sleep; the system makes it about 55 us.
_NAP = 1e-6
# The sleep between tests after _YIELD. A longer one would save little CPU time, and on a busy core it would cost much
# of the network's bandwidth (benchmarks/overlap.py).
PAUSE = 100e-6
# Like PAUSE, for a call that no thread waits for yet, while the program computes. Each test takes some 10 us of the
# core's time, and the bandwidth lost to the longer pause is hidden by computing. It is shorter than _YIELD: if one
# rank begins to spin when another begins to sleep, the first still spins when the second wakes.
LONG_PAUSE = 250e-6

# The message of a timeout describes the last calls of at most this many late ranks.
_SHOWN = 8

_ORDER = "Every rank must make the same calls in the same order"

_shared_until = _crowded_until = 0.0


def spin(test: Test) -> bool:
    """Repeats a test for a fraction of a millisecond. Returns: whether it became True."""
    global _shared_until, _crowded_until
    start = now = time.monotonic()
    while now - start < _YIELD:
        if now - start < (_SPIN if now >= _shared_until else _SHARED):
            pass
        elif now < _crowded_until:
            time.sleep(_NAP)
        else:
            os.sched_yield()
            yield_time = time.monotonic() - now
            if yield_time > _SHARED:
                _shared_until = now + _CROWDED
            if yield_time > _TAKEN:
                _crowded_until = now + _CROWDED
        if test():
            return True
        now = time.monotonic()
    return False


def check_wait(call: CollectiveOp[Any], transport: Transport) -> None:
    """Checks a call whose test has not been True for a while.

    Raises: PeerLeft if a rank that it waits for has left; CollectiveTimeout if the time limit of this step has passed.
    """
    name = f"{call}{on_communicator(transport.label)}"
    exit_notices = transport.exit_notices()
    if exit_notices:
        if call.ended_by is not None:
            exited = call.ended_by(exit_notices)
        else:
            exited = left_before(exit_notices, transport.key, call.number)
        # Tested once more: what the rank sent before it left may have arrived just before its notice.
        if exited and not (call.test is not None and call.test()):
            raise PeerLeft(f"{describe_exits(exit_notices, exited)} while rank {transport.rank} waits in {name}")
    if call.deadline is None:
        call.deadline = Deadline(call.timeout)
    elif call.deadline.passed():
        late = describe_late(call, transport)
        raise CollectiveTimeout(f"rank {transport.rank}: {name} was not complete after {call.timeout:g} s. {late}")


def describe_late(call: CollectiveOp[Any], transport: Transport) -> str:
    """Names the ranks that are late for a call, as far as this rank knows, and the last calls of those on its node."""
    late = list(transport.late() if call.peers is None else call.peers)
    if not late:
        return f"{_ORDER}; one has not arrived, or hangs elsewhere"
    missed = "arrived" if call.peers is None else "made the call that it answers"
    head = f"{ranks_with_verb(late, 'has', 'have')} not {missed}".capitalize()
    processes = {rank: pid for rank in late[:_SHOWN] if (pid := transport.pid(rank)) is not None}
    lines = [f"\n  rank {rank} (pid {pid}): {describe_process(pid)}" for rank, pid in processes.items()]
    return f"{head}:{''.join(lines)}\n  {_ORDER}." if lines else f"{head}. {_ORDER}"
