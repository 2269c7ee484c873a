"""Agent: the parent process of each rank. It forks the rank, and does what must not go through the MPI engine.

Engines tear output lines apart, kill surviving ranks before these can report, and leave orphans. An agent is the rank's
parent and subreaper. One connection to the launcher carries the rank's output and exit status, and the signals and
standard input for the rank. When the launcher or the engine dies, the agent kills the rank and everything that the rank
has started. When the agent itself dies, the kernel kills the rank, and the launcher's reaper or the agent supervisor
kills the rest. The engine starts this file by path, so that no module in the user's working folder can shadow one of
the launcher's. This file imports as little as possible before the fork, because the rank keeps all of it in memory.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Puts the folder with the packages on the path, in place of the folder of this file. The rank later puts the
    # script's folder there instead. With PYTHONSAFEPATH (Python 3.11 on) the folder of this file is not on the path.
    # Then the folder with the packages is only added, and the rank removes it.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rpartition("/launcher/")[0]]

import os
import resource
import signal
from collections.abc import Sequence

from collectives.world import (
    AGENT,
    DEBUG_RANK,
    PAUSE_FD,
    REPORT,
    STATE_MEMORY,
    STATE_MEMORY_NAME,
    World,
    world_from_env,
)
from launcher import errors
from launcher.agent import rank
from launcher.agent.rank import STACKS_NAME, STDIN, unquote_colons
from launcher.linux import become_subreaper, die_with_parent, fill_standard_streams, fork, is_above, stat_of
from launcher.placement import PLACEMENT, THREADS, Placement

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from typing import NoReturn


def main(args: Sequence[str]) -> NoReturn:
    """Forks the rank, which runs `args` (see `launcher.agent.rank.run`), and watches it to its end.

    Raises: StartError if the rank cannot be started.
    """
    engine = os.getppid()
    launcher = os.environ.pop("DDP_LAUNCH_PID", None)
    # The launcher's pid alone does not identify it: on another host an ancestor may have the same pid, for example 1 if
    # the launcher runs in a container.
    on_its_host = os.environ.pop("DDP_LAUNCH_HOST", None) == os.uname().nodename
    ancestors = [engine]
    if launcher is not None and not (on_its_host and is_above(int(launcher))):
        # Imported late: an agent below the launcher needs this module only after the fork.
        from launcher.agent.agent_supervisor import run_agent_supervisor

        ancestors.insert(0, run_agent_supervisor())
    files = os.environ.pop("DDP_LAUNCH_FILES", None)
    if files is not None and len(ancestors) == 1:  # Agents below the launcher have inherited its raised limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    world = world_from_env() or World("", 0, 1, 0, 1)
    # Removed from the environment, so that no process that the rank starts inherits them.
    address = os.environ.pop("DDP_LAUNCH_ADDRESS")
    secret = os.environ.pop("DDP_LAUNCH_SECRET")
    stdin_rank = int(os.environ.get(DEBUG_RANK, "0"))
    fill_standard_streams()
    placement = Placement(os.environ.pop(PLACEMENT, ""), os.environ, world)
    become_subreaper()
    agent = os.getpid()
    slots = _make_slots(world.rank, on_its_host)
    agent_ends, rank_ends = _pipes()
    # Memory that the rank and its agent share.
    stacks = os.memfd_create(STACKS_NAME)
    page = os.memfd_create("ddp-pause")
    os.ftruncate(page, 4096)
    # Block SIGINT: Python discards signals that arrive during a fork. The rank unblocks SIGINT when it can handle it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    pid = fork()
    if pid == 0:
        die_with_parent(agent)
        _leave_group(0)
        for fd in agent_ends.values():
            os.close(fd)
        _take_streams(rank_ends, reads_stdin=world.rank == stdin_rank or args[0] == STDIN)
        for fd in (rank_ends["report"], page):  # Kept open for a program that replaces the rank by exec.
            os.set_inheritable(fd, True)
        os.environ.update(
            {
                AGENT: str(agent),
                REPORT: str(rank_ends["report"]),
                PAUSE_FD: str(page),
                "RANK": str(world.rank),
                "WORLD_SIZE": str(world.size),
            },
            **placement.environment(os.environ),
        )
        if placement.cores is not None:
            os.sched_setaffinity(0, placement.cores)
        rank.run(unquote_colons(args), stacks, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _leave_group(pid)
    for fd in rank_ends.values():
        os.close(fd)
    # From here on, the kernel also sends this process SIGTERM: when its parent dies.
    die_with_parent(ancestors[0], signal.SIGTERM)
    from launcher.agent.loop import Agent  # Imported late, because the rank has no use for it.

    identity = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": placement.local_rank,
        "gpus": placement.gpus,
        "threads": os.environ.get(THREADS, str(placement.threads)),
        "pid": pid,
        "agent": agent,
        "started": ancestors[0] if ancestors[1:] else agent,
        "engine": engine,
        "name": stat_of(engine).name,
        "host": os.uname().nodename,
        "slots": slots,
    }
    Agent(pid, agent_ends, stacks, page, ancestors).run(address, secret, identity)


def _leave_group(pid: int) -> None:
    """Puts the rank into a process group of its own. Agent and rank both do this: it must happen before either goes on.

    Engines signal the agent's whole group. The rank then gets the signal once, from its agent, and its child processes
    do not get it. And a rank that kills its own group, as shell scripts do, kills neither the agent nor the engine.

    pid: of the rank; 0: of this process
    """
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass  # The rank has done it and runs another program already, or it has ended.


def _make_slots(rank: int, on_launchers_host: bool) -> list[str]:
    """Makes two slots of memory for the rank's state, if it cannot open the launcher's. Puts them into STATE_MEMORY.

    Returns: the slots (PID/fd/FD); [] if the rank uses the launcher's memory, or the job keeps no state in memory.
    """
    words = os.environ.get(STATE_MEMORY, "").split()
    if not words:
        return []
    name = f"{STATE_MEMORY_NAME}-{words[0]}"
    if on_launchers_host and _is_memory(f"/proc/{words[1]}", name):
        return []
    slots = [f"{os.getpid()}/fd/{os.memfd_create(name)}" for _ in range(2)]
    words[2 * rank + 1 : 2 * rank + 3] = slots
    os.environ[STATE_MEMORY] = " ".join(words)
    return slots


def _is_memory(path: str, name: str) -> bool:
    """True if `path` is a file descriptor of anonymous memory with this name."""
    try:
        return os.readlink(path).startswith(f"/memfd:{name} ")
    except OSError:
        return False


def _pipes() -> tuple[dict[str, int], dict[str, int]]:
    """Makes pipes for the rank's standard streams and its reports. Returns: the agent's ends, the rank's ends"""
    agent_ends = {}
    rank_ends = {}
    for name in ("out", "err", "report"):
        agent_ends[name], rank_ends[name] = os.pipe()
    rank_ends["in"], agent_ends["in"] = os.pipe()
    for fd in agent_ends.values():
        os.set_blocking(fd, False)
    return agent_ends, rank_ends


def _take_streams(rank_ends: dict[str, int], reads_stdin: bool) -> None:
    """Called in the rank: makes the pipes its file descriptors 0 to 2. reads_stdin: if False, 0 is /dev/null"""
    if not reads_stdin:
        os.close(rank_ends["in"])
        rank_ends["in"] = os.open(os.devnull, os.O_RDONLY)
    for fd, name in enumerate(("in", "out", "err")):
        os.dup2(rank_ends[name], fd)
        os.close(rank_ends[name])
    # Flushes at `\r` too, so that progress bars show.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file that Python itself opened


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except errors.StartError as error:
        print(errors.start_error_line(error), file=sys.stderr)
        sys.exit(2)
