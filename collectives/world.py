"""The environment variables by which the process that started this rank describes the world.

Every engine gives its ranks their numbers in environment variables, which can be read without MPI. So `init` recognizes
a world of one rank without importing MPI. It is an error if MPI reports another rank or number of ranks than the
variables. The launcher imports this module too.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Mapping

#: Set by the agent in its rank's environment: the agent's pid.
AGENT = "DDP_AGENT"
#: Set by the agent: the file descriptor on which its rank reports, one JSON object per line.
REPORT = "DDP_REPORT_FD"
#: Set by `ddp-launch --trace`, or by the user: the folder in which every rank writes its part of a trace.
TRACE = "DDP_TRACE"
#: Set by `ddp-launch`: the number of this start of the job, 0 for the first. A later start resumes from a checkpoint or
#: from STATE_MEMORY, if the script uses `ddp.checkpoint`.
ATTEMPT = "DDP_ATTEMPT"
#: Set by `ddp-launch --backend`: the backend that `collectives.init(backend="auto")` uses.
BACKEND = "DDP_BACKEND"
#: Set by the agent: the file descriptor of a page that says when this rank's time limits are paused.
#: Byte 0 is nonzero during a pause. The native 64-bit integer at byte PAUSED_AT is the total length of all pauses that
#: have ended (ns). A rank needs this total because it cannot read byte 0 while it is stopped itself.
PAUSE_FD = "DDP_PAUSE_FD"
PAUSED_AT = 8
#: Byte PEER_FAILED_AT of that page is nonzero once the launcher ends this rank because another one has failed.
PEER_FAILED_AT = 16
#: Byte RESIZE_AT of that page is nonzero once the job is to go on with another number of ranks after a step.
RESIZE_AT = 24
#: Set by `ddp-launch`: a token of the job, then the slots that keep the ranks' state for the next start, each as a
#: file descriptor below /proc ("4711/fd/5"). "" if there are no slots, for example if the job is never started
#: again. First come two slots for each rank. The launcher holds them, or if the rank cannot open files of the
#: launcher, the rank's agent does. Then come the slots that agents of an earlier start still hold. Each slot is a
#: memfd, whose name is STATE_MEMORY_NAME, a hyphen and the token.
STATE_MEMORY = "DDP_STATE_MEMORY"
STATE_MEMORY_NAME = "ddp-state"
#: Set by `ddp-launch`: the number of the newest start whose ranks have all copied their state to STATE_MEMORY, or "-1".
STATE_HELD = "DDP_STATE_HELD"
#: Set by `ddp-launch`: the rank that gets the launcher's standard input, and a debugger at `breakpoint()`.
DEBUG_RANK = "DDP_DEBUG_RANK"

#: Set by a rank for the processes that it starts, which work for the rank and are not ranks themselves: the rank's
#: numbers, and the torchrun job that started the rank. See `collectives.start.child_environment`.
WORKER_OF = "DDP_WORKER_OF"

#: The exit code of a rank that stopped on request with its state saved: the same command continues the job. It is
#: EX_TEMPFAIL of sysexits.h, "try again later". Signals (128 + N), Python and engines use other codes.
STOPPED = 75


# Neither a dataclass nor a `typing.NamedTuple`: importing those modules would double what an agent imports.
class World(namedtuple("World", ("engine", "rank", "size", "local_rank", "local_size"), defaults=(None, None))):
    """A rank's position in the world, as its engine promised it.

    engine: "mpich" (also Intel MPI and everything else that speaks PMI-1), "openmpi" or "slurm"; "environment" if
        torchrun or another launcher that is not an MPI engine has set RANK and WORLD_SIZE: see `rendezvous`
    rank, size: this rank and the number of ranks
    local_rank, local_size: the same among the ranks of this node; None if the engine does not say
    """

    __slots__ = ()
    engine: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


_OMPI = "OMPI_COMM_WORLD"

# Engine, then its variables for rank, size, local rank and local size. The order matters. srun always sets SLURM_*,
# and may set PMI_*, too. Ranks of Open MPI's mpiexec in an allocation also have Slurm's variables of the batch step.
_ENGINE_VARIABLES = (
    ("openmpi", f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Not SLURM_NTASKS: it is set in a batch script, too, where srun has started no ranks.
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# torchrun sets this in its ranks, however torchrun itself was started.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_ENVIRONMENT = ("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def world_from_env(environ: Mapping[str, str] = os.environ) -> World | None:
    """The world that the engine promised; None if no engine started this process.

    Raises: ValueError if an engine's variable is not a number.
    """
    # A process that a torchrun rank has started inherits its variables, but may itself be a rank of another engine.
    by_torchrun = _TORCHRUN in environ and (WORKER_OF not in environ or started_by_torchrun(environ))
    candidates = (_ENVIRONMENT, *_ENGINE_VARIABLES) if by_torchrun else (*_ENGINE_VARIABLES, _ENVIRONMENT)
    for engine, rank, size, local_rank, local_size in candidates:
        if rank in environ and size in environ:
            return World(
                engine=engine,
                rank=_number(environ, rank),
                size=_number(environ, size),
                local_rank=_number(environ, local_rank) if local_rank in environ else None,
                local_size=_number(environ, local_size) if local_size in environ else None,
            )
    return None


def torchrun_job(environ: Mapping[str, str]) -> str:
    """A text that identifies the torchrun job that set these variables; "" without torchrun."""
    return f"{environ[_TORCHRUN]} {environ.get('MASTER_PORT', '')}" if _TORCHRUN in environ else ""


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """True if torchrun started this process, and torchrun itself was started by the rank that WORKER_OF describes."""
    _, separator, job = environ.get(WORKER_OF, "").partition(";")
    return bool(separator) and torchrun_job(environ) not in ("", job)


def supervised(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a rank that an agent watches. After a failure such a rank exits, and the launcher ends the other ranks.

    Children of a rank inherit the variable AGENT, but their parent is not the agent, so the result is False in them.
    """
    return environ.get(AGENT) == str(os.getppid())


def report(environ: Mapping[str, str] = os.environ, **message: object) -> None:
    """Sends a message about this rank to the agent; does nothing without an agent.

    raised: an uncaught exception
    refused: the reason why the program could not be started
    flight: the file descriptor of this rank's flight record
    leaving: an exit status other than 0
    stopped: the step after which the rank has stopped on request, its state saved; it exits with STOPPED next
    joining: maximum seconds that the rank waits for all ranks to join the world; None: it no longer waits
    joined, left: the rank became part of a world in which others may wait for it, or has left that world
    resizable: the rank is in a loop in which the job can be resized, to at most this number of ranks; 0: to any number
    resizing: the step after which the rank leaves that loop; next it saves its state, and exits with STOPPED
    held: the step at which all ranks have copied their state to memory; sent for the first copy, maybe for later ones
    debugging: whether a debugger's prompt is open
    quit: how the user ended the debugger, and with it the job
    """
    if supervised(environ) and REPORT in environ:
        import json  # Imported late, because what an agent imports before the fork stays in its rank.

        try:
            with open(int(environ[REPORT]), "wb", closefd=False) as pipe:
                # The first newline is for a line that another program wrote here by mistake, and did not end.
                pipe.write(b"\n" + json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # The agent has exited, so this rank is about to be killed.


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"environment variable {name} should be a whole number, is {environ[name]!r}") from None
