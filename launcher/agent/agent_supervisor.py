"""Agent supervisor: the process above an agent on other hosts, and below a daemon such as Slurm's.

`kill -9` of an agent ends its rank, but not what the rank started in sessions of its own. Those processes come to the
agent supervisor, a subreaper and the process that the engine started, which ends them and then exits like the agent. It
forks the agent before anything else happens, shares its memory with it, and only waits. On the launcher's own host the
launcher's reaper does this for all agents.
"""

from __future__ import annotations

import os
import resource
import signal
import time

from launcher.linux import become_subreaper, die_with_parent, fork, sweep

TYPE_CHECKING = False  # not of `typing`, whose import would cost an agent a tenth of its memory
if TYPE_CHECKING:
    from typing import NoReturn

# What an engine says to the process that it has started is meant for the agent. SIGTERM comes, too, when it has died.
_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def run_agent_supervisor() -> int:
    """Forks, and returns the reaper's pid in the child alone, which is to be the agent. Raises: StartError"""
    engine, began = os.getppid(), time.time()
    become_subreaper()
    # Blocked signals wait for `sigwait`; no handler is needed, and none is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_PASSED_ON})
    reaper = os.getpid()
    agent = fork()
    if agent != 0:
        die_with_parent(engine, signal.SIGTERM)
        _watch(agent, began)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.setpgid(0, 0)  # what the engine sends to its whole group is passed on, once; and may kill the reaper alone
    return reaper


def _watch(agent: int, began: float) -> NoReturn:
    while True:
        number = signal.sigwait({signal.SIGCHLD, *_PASSED_ON})
        if number != signal.SIGCHLD:
            os.kill(agent, number)  # not reaped yet, so the pid is the agent's
            continue
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid == agent:
            _end_like(os.waitstatus_to_exitcode(status), began)


def _end_like(code: int, began: float) -> NoReturn:
    """Ends everything below this process, and it as its agent has ended."""

    from launcher.linux import remove_stale_segments

    sweep(SWEEP_LIMIT)
    if code != 0:
        remove_stale_segments(began)  # of a killed MPI; the last reaper on the host finds what no rank holds any more
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # the agent has ended
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    end_like(code)


SWEEP_LIMIT = 2.0  # s
_BEGAN = time.time()  # the rank has hardly been forked when an agent imports this


def end_like(code: int) -> NoReturn:
    """Ends this process with an exit code, or by a signal if `code` is minus its number."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's core is the one of interest
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def end_at_once() -> NoReturn:
    """Ends everything below this process, and it."""
    sweep(SWEEP_LIMIT)
    # On other hosts than the launcher's no reaper does it; the last agent there finds the files that no rank holds.
    from launcher.linux import remove_stale_segments

    remove_stale_segments(_BEGAN)
    os._exit(1)
