"""n ranks as threads of one process: tests of collectives and of what is built on them, in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from collectives.backends.threads import ThreadGroup, ThreadTransport
from collectives.communicator import Communicator
from collectives.engine.shutdown import exit_code
from collectives.errors import ArgumentError, CollectiveTimeout, PeerLeft
from collectives.exit_notice import ExitNotice, is_clean
from collectives.time_limit import TimeLimit

T = TypeVar("T")

_SPEAK = 1.0  # s; a collective that times out names itself, which says more than "still ran"

_local = threading.local()


def current() -> Communicator | None:
    """The communicator of the simulated rank that this thread is, if it is one."""
    comm: Communicator | None = getattr(_local, "comm", None)
    return comm


def run_threads(fn: Callable[[Communicator], T], size: int = 4, *, timeout: float = 60.0) -> list[T]:
    """Runs `fn(comm)` on `size` ranks, each a thread of this process.

    fn: called with the rank's communicator, which `collectives.init()` returns there too
    timeout: seconds; the time limit of every collective and of the whole
    Returns: each rank's result, in rank order

    Raises: the exception of the first rank that failed; CollectiveTimeout if a rank does not end in time, naming it.
    """
    if not isinstance(size, int) or size < 1:
        raise ArgumentError(f"size should be at least 1, is {size!r}")
    board = ThreadGroup(size)
    left: dict[int, ExitNotice] = {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        comm = Communicator(ThreadTransport(board, rank, left), timeout)
        _local.comm = comm
        status = 1
        try:
            results[rank] = fn(comm)
            status = 0
        except SystemExit as exit_:
            errors.append(exit_)
            status = exit_code(exit_.code)
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            comm.registry.drain(TimeLimit(timeout if is_clean(status) else 0.0))
            left[rank] = ExitNotice(status=status, calls=comm.registry.calls())
            comm.registry.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit = TimeLimit(timeout + _SPEAK)
    for thread in threads:
        while thread.is_alive() and not limit.passed():
            thread.join(limit.remaining())
    causes = [error for error in errors if not isinstance(error, PeerLeft)] or errors
    if causes:
        raise causes[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        raise CollectiveTimeout(f"{', '.join(late)} of {size} still ran after {timeout:g} s")
    return [results[rank] for rank in range(size)]
