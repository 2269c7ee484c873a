"""The guard above a keeper where the launcher has none: on other hosts, and below a daemon such as Slurm's.

A `kill -9` of a keeper ends its rank, but not what the rank had started in sessions of its own. That comes to the
guard, a subreaper and the process that the engine has started, which ends it, and then as the keeper did. It forks the
keeper before anything else happens, shares its memory with it, and only waits.
"""

from __future__ import annotations

import os
import signal
import time

from launcher.process import become_subreaper, die_with_parent, fork, sweep

TYPE_CHECKING = False  # not of `typing`, whose import would cost every keeper a tenth of its memory
if TYPE_CHECKING:
    from typing import NoReturn

# What an engine says to the process that it has started is meant for the keeper. SIGTERM comes, too, when it has died.
_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def stand_guard() -> int:
    """Forks, and returns the guard's pid in the child alone, which is to be the keeper. Raises: Refusal"""
    engine, began = os.getppid(), time.time()
    become_subreaper()
    # Blocked signals wait for `sigwait`; no handler is needed, and none is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_PASSED_ON})
    guard = os.getpid()
    keeper = fork()
    if keeper != 0:
        die_with_parent(engine, signal.SIGTERM)
        _watch(keeper, began)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.setpgid(0, 0)  # what the engine sends to its whole group is passed on, once; and may kill the guard alone
    return guard


def _watch(keeper: int, began: float) -> NoReturn:
    while True:
        number = signal.sigwait({signal.SIGCHLD, *_PASSED_ON})
        if number != signal.SIGCHLD:
            os.kill(keeper, number)  # not reaped yet, so the pid is the keeper's
            continue
        pid, status = os.waitpid(keeper, os.WNOHANG)
        if pid == keeper:
            _end_like(os.waitstatus_to_exitcode(status), began)


def _end_like(code: int, began: float) -> NoReturn:
    """Ends everything below this process, and it as its keeper has ended."""
    from launcher.keeping.ending import SWEEP_LIMIT, end_like
    from launcher.leftovers import remove_leftovers

    sweep(SWEEP_LIMIT)
    if code != 0:
        remove_leftovers(began)  # of a killed MPI; the last guard on the host finds what no rank holds any more
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # nobody is left to whom it could be passed on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    end_like(code)
