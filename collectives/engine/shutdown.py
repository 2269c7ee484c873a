"""The orderly exit: ranks leave together, or the job ends.

MPI_Finalize waits for all ranks, without a time limit or a message. So at exit every rank first sends the others its
status and call counts, and waits for theirs. Under a launcher, a rank that failed does not wait: it exits, and the
launcher ends the other ranks. If all ranks have sent theirs, MPI is finalized, unless a failure makes that unsafe.
Otherwise the job ends with the status of the first rank that failed. If none failed, but some ranks did not come in
time, the others print which ranks are missing, and end the job with status 1. A rank that stopped on request (STOPPED)
also waits for the others. If it exited before they have finalized MPI, the engine would kill them, and print a long
error message.
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
from collectives.errors import name_ranks
from collectives.time_limit import Deadline
from collectives.transport import LOST, ExitNotice, is_clean
from collectives.world import STOPPED

# How long ranks wait after a failure before they end the job (s), so that every rank can print its error.
_GRACE = 1.0
# Time for the engine to read this rank's output (s). On an abort the engine drops what it has not read, such as a
# traceback.
_READ = 0.1
# The pause between two checks for exit notices (s).
_PAUSE = 0.2e-3


class Membership(Protocol):
    """The interface of a world that `shut_down` uses. `MPIWorld` implements and documents it."""

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
    """The exit status with which this process will end, as far as it can be known at exit.

    Python shows atexit handlers neither the argument of sys.exit nor whether an exception ended the script, so both are
    intercepted. A SystemExit that was caught is ignored if calls were made after it.
    """

    def __init__(self, calls_made: Callable[[], int]) -> None:
        self._calls_made = calls_made
        self._raised: int | None = None
        self._asked: tuple[int, int] | None = None

    def watch(self) -> None:
        """Replaces sys.exit and sys.excepthook by functions that also record the status."""
        original_exit = sys.exit
        original_excepthook = sys.excepthook

        def exit(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._asked = (exit_code(status), self._calls_made())
            original_exit(status)

        def hook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._raised = 130 if issubclass(error_type, KeyboardInterrupt) else 1
            original_excepthook(error_type, error, trace)

        sys.exit = exit
        sys.excepthook = hook

    def status(self) -> int:
        """The exit status, as far as it was seen."""
        if self._raised is not None:
            return self._raised
        if self._asked is not None and self._asked[1] == self._calls_made():
            return self._asked[0]
        return 0


def exit_code(status: object) -> int:
    """The exit code of `sys.exit(status)`: 0 for None, an integer modulo 256, 1 for anything else."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def job_status(own_status: int, before: Sequence[int], after: Sequence[int]) -> int:
    """The job's status: the first known failure, 1 for LOST; otherwise STOPPED if any rank stopped on request, else 0.

    own_status: this rank's status; before: statuses that had arrived when this rank left, in order
    after: statuses that arrived later; those in `before` may be among them
    """
    statuses = [*before, own_status, *after]
    first = next((status for status in statuses if not is_clean(status)), STOPPED if STOPPED in statuses else 0)
    return 1 if first == LOST else first


def shut_down(
    membership: Membership, registry: CommunicatorRegistry, status: int, timeout: float, supervised: bool
) -> None:
    """Leaves the world together with the other ranks, or ends this process or the job.

    Returns only if Python may continue exiting.

    status: this process's exit status; timeout: seconds to wait for the others; supervised: whether a launcher ends
    the other ranks after a failure
    """
    deadline = Deadline(timeout)
    before = [notice.status for notice in membership.exit_notices().values()]
    if is_clean(status):
        registry.drain(deadline)
    membership.leave(ExitNotice(status=status, calls=registry.calls()))
    if supervised and not is_clean(status):
        _flush()
        os._exit(status)  # The launcher sees the exit status, and ends the other ranks.
    failed = _wait_for_notices(membership, status, deadline)
    broken = registry.broken()
    exit_notices = membership.exit_notices()
    missing = [rank for rank in range(membership.size) if rank != membership.rank and rank not in exit_notices]
    if not missing and not (failed and (broken or not membership.aborts_all)):
        membership.finalize()
        return
    code = job_status(status, before, [notice.status for notice in exit_notices.values()])
    if not failed and missing:
        _print(
            f"collectives: rank {membership.rank} has finished and waited {timeout:g} s for {name_ranks(missing)}, "
            "still at work or hanging. Ending the job"
        )
        code = 1
    _flush()
    if supervised:
        os._exit(code)
    if is_clean(status):
        time.sleep(_GRACE)  # If a rank failed, that rank prints its error and ends the job.
    time.sleep(_READ)
    membership.abort(code)


def _wait_for_notices(membership: Membership, status: int, deadline: Deadline) -> bool:
    """Waits until all exit notices have arrived and this rank's own are sent, at most until `deadline`.

    Once a failure is known, waits at most `_GRACE` longer. Returns: whether a failure is known
    """
    failed_at: float | None = None
    while True:
        exit_notices = membership.exit_notices()
        now = time.monotonic()
        if failed_at is None and (not is_clean(status) or any(notice.failed for notice in exit_notices.values())):
            failed_at = now
        all_left = len(exit_notices) == membership.size - 1 and membership.notices_sent()
        grace_over = failed_at is not None and now > failed_at + _GRACE
        if all_left or grace_over or deadline.passed():
            return failed_at is not None
        time.sleep(_PAUSE)


def _flush() -> None:
    # The process ends without Python's own cleanup, so buffered output is written here.
    if "logging" in sys.modules:
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # Closed or missing: there is nowhere to report that.
            pass


def _print(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)
