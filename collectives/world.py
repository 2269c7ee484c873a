"""The environment contract: what the process that started this rank promised about the world.

Every engine tells its ranks who they are through environment variables; reading them costs nothing, so a world of one
never imports MPI, and a world that turns out smaller than promised is an error instead of a silent singleton.
The launcher imports this module too.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Mapping

#: Set by the agent to its own pid, in the environment of the rank it watches.
AGENT = "DDP_AGENT"
#: Set by the agent to the file descriptor on which its rank reports, one JSON object a line.
REPORT = "DDP_REPORT_FD"
#: Set by `ddp-launch --trace`, or by the user: the folder in which every rank leaves its part of a trace.
TRACE = "DDP_TRACE"
#: Set by `ddp-launch`: which start of the job this is, 0 the first; a script that finds more looks for a checkpoint.
ATTEMPT = "DDP_ATTEMPT"
#: Set by `ddp-launch --backend`: what `collectives.init(backend="auto")` takes, instead of choosing by itself.
BACKEND = "DDP_BACKEND"
#: Set by the agent to the file descriptor of a page that says when the time limits of this rank stand still.
#: Byte 0 is not 0 while they do. The native 64-bit integer at byte PAUSED_AT counts the nanoseconds for which they did,
#: pauses that have ended: a rank that was stopped meanwhile could not look at byte 0.
PAUSE_FD = "DDP_PAUSE_FD"
PAUSED_AT = 8
#: Set by `ddp-launch`: the rank that has its standard input, and a debugger at `breakpoint()`.
DEBUG_RANK = "DDP_DEBUG_RANK"

#: Set in a process that works for a rank and is none, to the rank's place: see `collectives.start`.
WORKER_OF = "DDP_WORKER_OF"

#: The exit code of a rank that stopped as it was asked to, its state saved: start the same command to go on. It is
#: EX_TEMPFAIL of sysexits.h, "try again later": no signal's 128 + N, and nothing that Python or an engine ends with.
STOPPED = 75


# Neither a dataclass nor of `typing`: their imports would cost every agent as much as all the rest.
class World(namedtuple("World", ("engine", "rank", "size", "local_rank", "local_size"), defaults=(None, None))):
    """A rank's place in the world, as its engine promised it.

    engine: "mpich" (also Intel MPI and whatever speaks PMI-1), "openmpi" or "slurm"; "environment" where torchrun or
        another launcher that is no MPI engine has set RANK and WORLD_SIZE: see `rendezvous`
    rank, size: this rank and the number of ranks
    local_rank, local_size: the same among the ranks of this node; None where the engine does not say
    """

    __slots__ = ()
    engine: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


_OMPI = "OMPI_COMM_WORLD"

# engine, then the variables of rank, size, local rank and local size. The order matters: MPICH under srun sets PMI_* or
# SLURM_STEP_*, and Open MPI's mpiexec inside an allocation sees Slurm's variables of the batch step as well.
_TABLE = (
    ("openmpi", f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_NTASKS holds in a batch script though no step runs there: only the step's own size is a promise.
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# Whatever started torchrun, its ranks were started by torchrun.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_ENVIRONMENT = ("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def promised(environ: Mapping[str, str] = os.environ) -> World | None:
    """The world that the engine promised, or None where no engine started this process.

    Raises: ValueError if an engine's variable holds no number.
    """
    # What a rank of torchrun has started inherits these, and may be a rank of an engine.
    first = _TORCHRUN in environ and (WORKER_OF not in environ or started_by_torchrun(environ))
    for engine, rank, size, local_rank, local_size in (_ENVIRONMENT, *_TABLE) if first else (*_TABLE, _ENVIRONMENT):
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
    """Which job of torchrun set these variables; "" without one."""
    return f"{environ[_TORCHRUN]} {environ.get('MASTER_PORT', '')}" if _TORCHRUN in environ else ""


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """True if torchrun started this process, and was itself started by the rank whose placement stands in WORKER_OF."""
    _, found, job = environ.get(WORKER_OF, "").partition(";")
    return bool(found) and torchrun_job(environ) not in ("", job)


def supervised(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a rank that an agent watches: who fails there just exits, and the launcher ends the others.

    Children of a rank inherit the variable but not the parent, so they are not taken for ranks.
    """
    return environ.get(AGENT) == str(os.getppid())


def report(environ: Mapping[str, str] = os.environ, **message: object) -> None:
    """Tells the agent something of this rank, in the order in which it happens; where there is no agent, nothing.

    raised: an uncaught exception; leaving: an exit status; stopped: the step after which it stops as it was asked to,
    its state saved, just before it leaves with STOPPED; joining: it waits for all ranks to join the world, so many
    seconds at most, or (None) no longer; joined, left: it became part of a world in which others may wait for it, and
    took its leave of them
    debugging: a debugger's prompt is open, or no longer; quit: how the user ended the debugger, and with it the job
    """
    if supervised(environ) and REPORT in environ:
        import json  # here, because an agent imports this module before it forks its rank

        try:
            with open(int(environ[REPORT]), "wb", closefd=False) as pipe:
                # On a line of its own, whatever another program of this rank may have written there by mistake.
                pipe.write(b"\n" + json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the agent has gone, and this rank is about to be killed for it


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"environment variable {name} should be a whole number, is {environ[name]!r}") from None
