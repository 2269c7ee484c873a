"""Agent: the process beside each rank. It forks the rank, and does what must not go through the MPI engine.

Engines tear lines, kill survivors before these can speak, and leave orphans. An agent is the rank's parent and
subreaper: it forwards output, exit status and signals over one connection to the launcher, and ends the rank and all
that the rank started when the launcher, the engine or the agent itself dies. The engine starts it by path, so that no
module in the user's working folder can shadow ours. This file holds what comes before the fork, and imports as little
as it can, because the rank keeps it in memory.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Not this folder but the one that holds the package; the rank replaces it by the script's. With PYTHONSAFEPATH this
    # folder is not there (Python 3.11 on), and what comes first is the user's.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rpartition("/launcher/")[0]]

import os
import resource
import signal
from collections.abc import Sequence

from collectives.world import AGENT, DEBUG_RANK, PAUSE_FD, REPORT, World, world_from_env
from launcher import errors
from launcher.agent import rank
from launcher.agent.rank import STACKS_NAME, STDIN, unquote_colons
from launcher.linux import become_subreaper, die_with_parent, fill_standard_streams, fork, is_above, stat_of
from launcher.placement import PLACEMENT, Placement

TYPE_CHECKING = False  # not of `typing`, whose import would cost every agent a tenth of its memory
if TYPE_CHECKING:
    from typing import NoReturn


def main(args: Sequence[str]) -> NoReturn:
    """Forks the rank that runs `args` (see `launcher.agent.rank.run`) and keeps it until its end.

    Raises: StartError if the rank cannot be started.
    """
    engine = os.getppid()
    launcher = os.environ.pop("DDP_LAUNCH_PID", None)
    above = [engine]
    if launcher is not None and not is_above(int(launcher)):
        from launcher.agent.agent_supervisor import (
            run_agent_supervisor,  # here, because most agents have the launcher's reaper above them
        )

        above.insert(0, run_agent_supervisor())
    files = os.environ.pop("DDP_LAUNCH_FILES", None)
    if files is not None and len(above) == 1:  # on the launcher's host, whose own limit has come down to here
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    world = world_from_env() or World("", 0, 1, 0, 1)
    # Taken out, so that nothing the rank starts inherits them.
    address, secret = os.environ.pop("DDP_LAUNCH_ADDRESS"), os.environ.pop("DDP_LAUNCH_SECRET")
    reader = int(os.environ.get(DEBUG_RANK, "0"))
    fill_standard_streams()
    placement = Placement(os.environ.pop(PLACEMENT, ""), os.environ, world)
    become_subreaper()
    agent = os.getpid()
    ours, theirs = _pipes()
    # Memory that the rank and its agent share.
    stacks, page = os.memfd_create(STACKS_NAME), os.memfd_create("ddp-pause")
    os.ftruncate(page, 4096)
    # What comes right after a fork, Python takes for the parent's and forgets: the rank takes it when it can.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    pid = fork()
    if pid == 0:
        die_with_parent(agent)
        _leave_group(0)
        for fd in ours.values():
            os.close(fd)
        if world.rank != reader and args[0] != STDIN:
            os.close(theirs["in"])
            theirs["in"] = os.open(os.devnull, os.O_RDONLY)
        for name, fd in (("in", 0), ("out", 1), ("err", 2)):
            os.dup2(theirs[name], fd)
            os.close(theirs[name])
        for fd in (theirs["report"], page):  # for a program that takes the rank's place by exec
            os.set_inheritable(fd, True)
        # `\r` counts as a line end here, so that progress bars show.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file that Python itself opened
        os.environ.update(
            {
                AGENT: str(agent),
                REPORT: str(theirs["report"]),
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
    for fd in theirs.values():
        os.close(fd)
    # A signal may come from the engine (it ends the job) or from the kernel (the engine has died).
    die_with_parent(above[0], signal.SIGTERM)
    from launcher.agent.loop import Agent  # here, because the rank has no use for it

    identity = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": placement.local_rank,
        "gpus": placement.gpus,
        "pid": pid,
        "agent": agent,
        "started": above[0] if above[1:] else agent,
        "engine": engine,
        "name": stat_of(engine).name,
        "host": os.uname().nodename,
    }
    Agent(pid, ours, stacks, page, above, identity).keep(address, secret)


def _leave_group(pid: int) -> None:
    """Gives the rank a process group of its own; 0: this process. Done on both sides, since either may be first.

    Engines signal the agent's whole group. What is meant for the rank it gets from its agent then, once, and what it
    started does not; and who kills its own group, as shell scripts do, kills neither the agent nor the engine.
    """
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass  # the rank has done it, and is another program already, or has ended


def _pipes() -> tuple[dict[str, int], dict[str, int]]:
    """The agent's and the rank's ends of the rank's standard streams and of its reports."""
    ours, theirs = {}, {}
    for name in ("out", "err", "report"):
        ours[name], theirs[name] = os.pipe()
    theirs["in"], ours["in"] = os.pipe()
    for fd in ours.values():
        os.set_blocking(fd, False)
    return ours, theirs


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except errors.StartError as error:
        print(errors.start_error_line(error), file=sys.stderr)
        sys.exit(2)
