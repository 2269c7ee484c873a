"""Agent supervisor: the process between the engine and an agent that is not below the launcher's reaper.

Such agents are those on other hosts, and those that Slurm starts on any host. `kill -9` of an agent ends its rank, but
not the processes that the rank started. The agent supervisor is a subreaper: it becomes the parent of these processes,
kills them, and exits like the agent. The engine starts the supervisor. The supervisor forks the agent before either
imports more, so that both share memory. Then it only forwards signals and waits. The reaper kills the processes that
its descendants leave behind, so agents below it need no supervisor.
"""

from __future__ import annotations

import os
import resource
import signal
import time

from launcher.linux import FORWARDED_SIGNALS, become_subreaper, die_with_parent, fork, sweep

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from typing import NoReturn


def run_agent_supervisor() -> int:
    """Forks the agent. Returns only in the agent: the pid of the supervisor, its parent.

    Raises: StartError if this user may have no more processes.
    """
    engine = os.getppid()
    started_at = time.time()
    become_subreaper()
    # Blocked signals stay pending until `sigwait` takes them, so no handler is needed and no signal is lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED_SIGNALS})
    supervisor = os.getpid()
    agent = fork()
    if agent != 0:
        die_with_parent(engine, signal.SIGTERM)
        _wait_for_agent(agent, started_at)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # A signal to the engine's process group must reach the agent once, forwarded, and not a second time directly.
    os.setpgid(0, 0)
    return supervisor


def _wait_for_agent(agent: int, started_at: float) -> NoReturn:
    while True:
        # The engine signals this process, which it has started. The kernel sends SIGTERM when the engine dies.
        number = signal.sigwait({signal.SIGCHLD, *FORWARDED_SIGNALS})
        if number != signal.SIGCHLD:
            os.kill(agent, number)  # It has not been reaped yet, so the pid is still the agent's.
            continue
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid == agent:
            code = os.waitstatus_to_exitcode(status)
            # If the agent failed, its rank's MPI may have left files in /dev/shm. `sweep` removes those that no other
            # process uses.
            sweep(SWEEP_LIMIT, started_at=None if code == 0 else started_at)
            for number in FORWARDED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # There is no agent to forward them to.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
            exit_like(code)


# After this long (s) `sweep` gives up killing what is left.
SWEEP_LIMIT = 2.0
# When the agent started, to within milliseconds: it imports this module just before or after it forks its rank.
_STARTED_AT = time.time()


def exit_like(code: int) -> NoReturn:
    """Ends this process with exit code `code`, or by signal `-code` if it is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Only the rank's core dump is of interest.
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def kill_and_exit() -> NoReturn:
    """Kills every process below this one, removes unused files of the MPI in /dev/shm, and exits with 1."""
    # The launcher's reaper removes the MPI's files, too, but not every agent is below it. Files that other ranks on the
    # host use stay.
    sweep(SWEEP_LIMIT, started_at=_STARTED_AT)
    os._exit(1)
