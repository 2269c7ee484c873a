"""Failures of a job, the root cause among several, and the exit code. Pure: failures in, sentences and a number out."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from collectives.errors import name_ranks, ranks_with_verb
from collectives.world import STOPPED

# The death of an engine or an agent may be the cause of a failure that was noticed at most this long (s) before it.
_SAME_CAUSE = 0.5

# Exceptions of a rank whose peer has left or failed. If the peer has failed, its own failure explains more.
_PEER_FAILURES = ("collectives.errors.PeerLeft", "ddp.errors.PeerError")

_COLLECTIVES = "collectives.errors."
# Exceptions of a rank that cannot reach its peers.
_UNREACHABLE_PEERS = ("collectives.errors.CollectiveTimeout", "collectives.errors.NcclError")
# The beginning of messages of `collectives`.
_RANK_PREFIX = re.compile(r"^rank \d+: ")

_FULL_SHM = "a full /dev/shm (df /dev/shm; in a container docker run --shm-size=1g)"

# By signal: what it usually means if it killed a rank.
_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory",
    signal.SIGSEGV: f"invalid memory access in native code; while ranks start, often {_FULL_SHM}",
    signal.SIGBUS: f"often {_FULL_SHM}",
    signal.SIGABRT: "abort() in native code, whose message stands above; for one about threads or processes: ulimit -u",
    signal.SIGXFSZ: "a file larger than allowed (ulimit -f)",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGILL: "an instruction that this CPU does not have",
}

# By words in an exception's message: the advice that is added to it.
_ADVICE = {
    "attempted relative import with no known parent package": "a module of a package is started by -m: "
    "ddp-launch -m PACKAGE.MODULE",
    "can't start new thread": "this user may have no more processes and threads: ulimit -u",
    "[Errno 27]": "ulimit -f limits the size of files",
}


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An uncaught exception."""

    type: str
    message: str
    traceback: str

    def same_as(self, other: Raised) -> bool:
        """True if both have the same type and message, apart from the parts that `_comparable_message` removes."""
        return self.type == other.type and self._comparable_message() == other._comparable_message()

    def _comparable_message(self) -> str:
        """The message, without the parts that differ between ranks in errors of `collectives`."""
        if not self.type.startswith(_COLLECTIVES):
            return self.message
        # The lines after the first say what this rank saw of other ranks, and differ between ranks.
        return _RANK_PREFIX.sub("", self.message.partition("\n")[0])

    def __str__(self) -> str:
        first, *others = self.message.splitlines() or [""]
        if not first:
            return self.type
        advice = next((f" ({advice})" for words, advice in _ADVICE.items() if words in first), "")
        return f"{self.type}: {first}{' [...]' if others else ''}{advice}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that went wrong; `str` of it is the sentence for the user.

    noticed_at: when the launcher learned of it (monotonic, s)
    """

    noticed_at: float = field(default_factory=time.monotonic)

    @property
    def code(self) -> int:
        """The job's exit code, if this is the root cause."""
        return 1


@dataclass(frozen=True, kw_only=True)
class RankFailed(Failure):
    """A rank raised, ended with a status other than 0, or ended with 0 while others waited for it.

    host: where it ran; "" if the sentence should not name it
    status: exit code, or minus the signal that killed it
    asked: its agent was asked to end by a signal that the launcher had not sent. Most likely the engine was shutting
    down
    memory: a clause about the rank's memory, if the kernel may have killed it for lack of memory
    missed_by: ranks that wait for it in `collectives.init`, which it did not call
    """

    rank: int
    pid: int
    host: str = ""
    status: int | None = None
    asked: bool = False
    raised: Raised | None = None
    memory: str | None = None
    missed_by: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = name_rank(self.rank, self.pid, self.host)
        if self.raised is not None:
            return f"{who} raised {self.raised}"
        assert self.status is not None
        if self.status < 0:
            memory = f" ({self.memory})" if self.memory else ""
            return f"{who} was killed by {signal_name(-self.status)}{memory}"
        if self.missed_by:
            waiting = ranks_with_verb(self.missed_by, "waits", "wait")
            return f"{who} exited with code 0 before collectives.init(), where {waiting}"
        if self.status == 0:
            return f"{who} exited with code 0 while others were waiting (os._exit?)"
        return f"{who} exited with code {self.status}"

    @property
    def code(self) -> int:
        return 1 if self.raised is not None or not self.status else exit_code(self.status)


@dataclass(frozen=True, kw_only=True)
class AgentLost(Failure):
    """An agent, or the agent supervisor above it, died before it had reported its rank's end.

    host: where it ran; "" if the sentence should not name it
    started: pid of the process that the engine had started: the agent, or the agent supervisor
    """

    rank: int
    pid: int
    host: str = ""
    started: int | None = None

    def __str__(self) -> str:
        return f"the agent of {name_rank(self.rank, self.pid, self.host)} died, and its rank with it"


@dataclass(frozen=True, kw_only=True)
class EngineLost(Failure):
    """An agent's parent, a process of the engine, has died; or the launcher's reaper has died.

    host: where it ran; "" if the sentence should not name it
    above: the process is the launcher's reaper. The engine is its child, and dies with it
    """

    name: str
    pid: int
    host: str = ""
    above: bool = False

    def __str__(self) -> str:
        host = f" on {self.host}" if self.host else ""
        return f"{self.name or 'the MPI engine'}{host} (pid {self.pid}), which had started the ranks, died"


@dataclass(frozen=True, kw_only=True)
class EngineEnded(Failure):
    """The engine ended while ranks were running, or before all had started.

    missing: ranks that had not started yet; name: of the engine, as messages call it
    """

    pid: int
    status: int
    missing: tuple[int, ...] = ()
    name: str = "mpiexec"

    def __str__(self) -> str:
        end = f"exited with code {self.status}"
        if self.status < 0:
            end = f"was killed by {signal_name(-self.status, hint=False)}"
        when = f"before {name_ranks(self.missing)} had started" if self.missing else "while ranks were running"
        return f"{self.name} (pid {self.pid}) {end} {when}"

    @property
    def code(self) -> int:
        return exit_code(self.status) or 1


@dataclass(frozen=True, kw_only=True)
class NotStarted(Failure):
    """Ranks did not start in time, cannot start, or do not belong to this job. message: the sentence"""

    message: str
    code: int = 1

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class TimeLimit(Failure):
    """The job exceeded its time limit. code: the same as that of the command `timeout`"""

    seconds: float
    code: int = 124

    def __str__(self) -> str:
        return f"the job took longer than {self.seconds:g} s"


@dataclass(frozen=True, kw_only=True)
class NotStopped(Failure):
    """Ranks did not stop as asked, although others did. They were killed, or ended in another way.

    seconds: the maximum time that the launcher gave them
    """

    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        who = name_ranks(self.ranks)
        return f"{who} went on for {duration(self.seconds)} after the others had stopped as asked (more time: --grace)"


@dataclass(frozen=True, kw_only=True)
class Hung(Failure):
    """The job made no progress for too long.

    ranks: those for which the others wait, as far as known; message: the sentence
    """

    ranks: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class HeartbeatLost(Failure):
    """Agents have stopped sending anything.

    hosts: in a job of several hosts, those on which all agents are silent
    ranks: the ranks of these agents; only those on `hosts` if there are such hosts
    seconds: how long they have been silent
    more_time_helps: the silence reached `Job.heartbeat_timeout`, so a longer timeout would help
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float
    more_time_helps: bool = False

    def __str__(self) -> str:
        hosts = ""
        cause = "its agent is stopped"
        if self.hosts:
            hosts = f"host{'s' * (len(self.hosts) > 1)} {', '.join(self.hosts)} with "
            cause = "it"
        advice = " (more time: --heartbeat-timeout)" if self.more_time_helps else ""
        silence = f"no heartbeat for {duration(self.seconds)}"
        return f"lost {hosts}{name_ranks(self.ranks)}: {silence}, so {cause} or its network is down{advice}"


def root_cause(failures: Sequence[Failure], engine_output: bytes = b"") -> Failure:
    """The failure that caused the others: the first in the list, or a later one that may have caused the first.

    A lost host, the failure of a peer, and the death of an engine or an agent may cause other failures. An engine kills
    all ranks and agents when one of its processes dies. The launcher learns of these deaths at almost the same time, in
    any order.

    failures: in the order in which the launcher learned of them, at least one
    engine_output: what the engine printed; it names the pid of the process whose death it has noticed
    """
    first = failures[0]
    near = [failure for failure in failures if failure.noticed_at - first.noticed_at <= _SAME_CAUSE]
    ranks = [failure for failure in failures if isinstance(failure, RankFailed) and not failure.asked]
    agents = [failure for failure in near if isinstance(failure, AgentLost)]
    named = [agent for agent in agents if re.search(rb"PID %d\b" % (agent.started or agent.pid), engine_output)]
    engines = [failure for failure in failures if isinstance(failure, EngineEnded)]
    killed = [engine for engine in engines if engine in near and engine.status < 0]
    lost = sorted((failure for failure in near if isinstance(failure, EngineLost)), key=lambda engine: not engine.above)
    # Each row: a condition, and candidates. Of the rows whose condition is true, the first that has candidates decides:
    # its first candidate is the root cause.
    table: tuple[tuple[bool, Sequence[Failure]], ...] = (
        (True, [failure for failure in failures if isinstance(failure, HeartbeatLost)]),
        (is_peer_failure(first), [*(failure for failure in ranks if not is_peer_failure(failure)), first]),
        # SIGPIPE: the engine wrote to one of its processes, which had died.
        (isinstance(first, EngineEnded) and first.status == -signal.SIGPIPE, [*ranks, first]),
        # If the engine dies while MPI starts, MPI ends the rank with an exit code of its own.
        (isinstance(first, RankFailed) and first.raised is None and (first.status or 0) > 0 and not first.asked, lost),
        (not _may_be_consequence(first), [first]),
        (True, [*killed, *lost, *named, *(engine for engine in engines if engine.missing), *agents, first]),
    )
    return next(candidates[0] for condition, candidates in table if condition and candidates)


def is_peer_failure(failure: Failure) -> bool:
    """True if a rank raised only because another rank, for which it waited, has failed or left."""
    return isinstance(failure, RankFailed) and failure.raised is not None and failure.raised.type in _PEER_FAILURES


def may_follow_host_loss(failure: Failure) -> bool:
    """True if a lost host may have caused this failure, such as a collective that timed out, or a lost agent."""
    if isinstance(failure, RankFailed):
        if failure.raised is not None:
            return failure.raised.type in _UNREACHABLE_PEERS
        return failure.asked or failure.missed_by != ()
    return isinstance(failure, AgentLost | EngineLost | EngineEnded | NotStarted)


def _may_be_consequence(failure: Failure) -> bool:
    """True if the death of an engine or an agent may be the cause of this failure."""
    if isinstance(failure, RankFailed):
        return failure.raised is None and failure.asked
    return isinstance(failure, AgentLost | EngineLost | EngineEnded)


def describe_others(failures: Sequence[Failure], first: Failure) -> str:
    """One line about the ranks that failed, without the rank of `first`; "" if there are no others."""
    seen = {first.rank} if isinstance(first, RankFailed | AgentLost) else set()
    raised = first.raised if isinstance(first, RankFailed) else None
    clauses = []
    same = []
    for failure in failures:
        if isinstance(failure, RankFailed) and failure.rank not in seen:
            seen.add(failure.rank)
            if raised is not None and failure.raised is not None and failure.raised.same_as(raised):
                same.append(failure.rank)
            else:
                clauses.append(str(failure))
    if same:
        clauses.insert(0, f"{name_ranks(same)} raised the same")
    if len(clauses) > 3:
        clauses[3:] = [f"and {len(clauses) - 3} more"]
    return "; ".join(clauses)


def exit_code(status: int) -> int:
    """The exit code that a shell reports for a process that ended with `status` (exit code, or minus the signal).

    >>> [exit_code(status) for status in (0, 3, -9, -15)]
    [0, 3, 137, 143]
    """
    return status if status >= 0 else 128 - status


def signal_name(number: int, hint: bool = True) -> str:
    """A signal's name and number, with a hint at what it usually means, if there is one.

    >>> signal_name(9)
    'SIGKILL (signal 9); often the kernel, out of memory'
    """
    try:
        known = signal.Signals(number)
    except ValueError:  # Most real-time signals have no name.
        return f"signal {number}"
    name = f"{known.name} (signal {number})"
    return f"{name}; {_HINTS[known]}" if hint and known in _HINTS else name


def name_rank(rank: int, pid: int, host: str = "") -> str:
    """A rank's name in sentences: `rank 3 (pid 4711)`, or `rank 3 on node7 (pid 4711)`."""
    return f"rank {rank} on {host} (pid {pid})" if host else f"rank {rank} (pid {pid})"


def duration(seconds: float) -> str:
    """A number of seconds as text: `0.4 s`, `12 s`, `1200 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


class Stop(NamedTuple):
    """How a job stopped after it had been asked to stop.

    step: the last step of all ranks; None if they reported none, or different ones
    late: the ranks, sorted, whose status is neither 0 nor 75 (killed, crashed), or is unknown
    """

    step: int | None
    late: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The sentence for the user.

        >>> print(Stop(120))
        stopped as asked at step 120, state saved: start the same command to go on
        """
        if self.late:
            late = ranks_with_verb(self.late, "was", "were")
            return (
                f"{late} ended before all had saved (more time: --grace): start the same command to go on from the "
                "checkpoint before"
            )
        step = "" if self.step is None else f" at step {self.step}"
        return f"stopped as asked{step}, state saved: start the same command to go on"


def stop_of(ends: Mapping[int, int | None], steps: Collection[int] = ()) -> Stop | None:
    """How a job stopped, after all of its ranks have ended; None if no rank has stopped as it was asked to.

    ends: each rank's exit code, or minus the signal that killed it; None if unknown
    steps: the last step of each rank that has reported one
    """
    if STOPPED not in ends.values():
        return None
    # A rank that ended with 0 is not late: it had finished its work before the stop, and has nothing to save.
    late = tuple(sorted(rank for rank, status in ends.items() if status not in (0, STOPPED)))
    return Stop(next(iter(steps)) if len({*steps}) == 1 else None, late)
