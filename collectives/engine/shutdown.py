"""The orderly exit: no rank ends alone.

MPI_Finalize waits for all ranks, without a limit and without a word. So finalizing is ours: at exit every rank tells
the others its status and how far it came, and waits until it has heard from all of them. All there: finalize. Somebody
failed, or did not come in time: say who, and end the job with the first failing rank's status. Ranks that stopped as
they were asked to (STOPPED) part like those that are done: an engine that sees one die before the others have finalized
ends these, and says so on a page.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol

from collectives.engine.registry import CommunicatorRegistry
from collectives.time_limit import TimeLimit
from collectives.transport import LOST, ExitNotice, is_clean, name_ranks
from collectives.world import STOPPED

_GRACE = 1.0  # s; how long a failing rank lets the others find out and speak before it ends them
_READ = 0.1  # s; engines kill on abort and drop what they have not read: the traceback just printed
_PAUSE = 0.2e-3  # s


class Membership(Protocol):
    """What leaving needs of a world: see `MPIWorld`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def aborts_all(self) -> bool: ...
    def leave(self, exit_notice: ExitNotice) -> None: ...
    def exit_notices(self) -> Mapping[int, ExitNotice]: ...
    def notices_sent(self) -> bool: ...
    def finalize(self) -> None: ...
    def abort(self, status: int) -> None: ...


class ExitStatus:
    """How this process is ending, as far as that can be known before it has ended.

    Python shows atexit handlers neither the argument of sys.exit nor that an exception ended the script, so both are
    watched on their way. A SystemExit that was caught is forgotten when calls are made after it.
    """

    def __init__(self, calls_made: Callable[[], int]) -> None:
        self._calls_made = calls_made
        self._raised: int | None = None
        self._asked: tuple[int, int] | None = None

    def watch(self) -> None:
        """From now on, sys.exit and sys.excepthook pass through here."""
        exit_, excepthook = sys.exit, sys.excepthook

        def exit(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._asked = (exit_code(status), self._calls_made())
            exit_(status)

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._raised = 130 if issubclass(kind, KeyboardInterrupt) else 1
            excepthook(kind, error, trace)

        sys.exit, sys.excepthook = exit, hook

    def status(self) -> int:
        """The exit status, by what was seen."""
        if self._raised is not None:
            return self._raised
        if self._asked is not None and self._asked[1] == self._calls_made():
            return self._asked[0]
        return 0


def exit_code(status: object) -> int:
    """What `sys.exit(status)` makes of its argument: None is 0, a number is itself, all else is printed and is 1."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def job_status(mine: int, before: Sequence[int], after: Sequence[int]) -> int:
    """The job's status: the first failure known; without one STOPPED, if any rank stopped as it was asked to.

    before: the others' statuses that had arrived when this rank left, in order; after: those that arrived later
    """
    known = [*before, mine, *after]
    first = next((status for status in known if not is_clean(status)), STOPPED if STOPPED in known else 0)
    return 1 if first == LOST else first


def shut_down(
    membership: Membership, registry: CommunicatorRegistry, status: int, timeout: float, supervised: bool
) -> None:
    """Leaves the world together with the others, or ends the job; returns only where Python may go on exiting.

    status: this process's exit status; timeout: seconds to wait for the others; supervised: a launcher ends the others
    """
    limit = TimeLimit(timeout)
    before = [left.status for left in membership.exit_notices().values()]
    if is_clean(status):
        registry.drain(limit)
    membership.leave(ExitNotice(status=status, calls=registry.calls()))
    if supervised and not is_clean(status):
        _flush()
        os._exit(status)  # the launcher knows already, and ends the others
    failed = _wait_for_notices(membership, status, limit)
    broken = registry.broken()
    exit_notices = membership.exit_notices()
    missing = [rank for rank in range(membership.size) if rank != membership.rank and rank not in exit_notices]
    if not missing and not (failed and (broken or not membership.aborts_all)):
        membership.finalize()
        return
    code = job_status(status, before, [left.status for left in exit_notices.values()])
    if not failed and missing:
        _say(
            f"collectives: rank {membership.rank} has finished and waited {timeout:g} s for {name_ranks(missing)}, "
            "still at work or hanging. Ending the job"
        )
        code = 1
    _flush()
    if supervised:
        os._exit(code)
    if is_clean(status):
        time.sleep(_GRACE)  # the rank that failed ends the job, and has something to say first
    time.sleep(_READ)
    membership.abort(code)


def _wait_for_notices(membership: Membership, status: int, limit: TimeLimit) -> bool:
    """Waits for all others' exit notices; for a short grace only once a failure is known. True if one is."""
    failed_at: float | None = None
    while True:
        exit_notices = membership.exit_notices()
        now = time.monotonic()
        if failed_at is None and (not is_clean(status) or any(left.failed for left in exit_notices.values())):
            failed_at = now
        everyone = len(exit_notices) == membership.size - 1 and membership.notices_sent()
        enough = failed_at is not None and now > failed_at + _GRACE
        if everyone or enough or limit.passed():
            return failed_at is not None
        time.sleep(_PAUSE)


def _flush() -> None:
    # The process ends without Python's own clean-up: what it would have written out is written here.
    if "logging" in sys.modules:
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or never there: nothing can be said there anyway
            pass


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)
