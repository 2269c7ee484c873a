"""Failures of a job, the root cause among several, and the exit code. Pure: failures in, sentences and a number out."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from collectives.world import STOPPED

# An engine's death reaches its ranks within this many seconds, as TERM or KILL out of nowhere.
_SAME_CAUSE = 0.5

# What `collectives` and `ddp` raise in a rank whose peer has gone, or failed; the peer's own failure, if it was one,
# says more.
_ECHOES = ("collectives.errors.PeerLeft", "ddp.errors.PeerError")

_OURS = "collectives.errors."
# What it raises in a rank whose peers cannot be reached.
_MISSES = ("collectives.errors.CollectiveTimeout", "collectives.errors.NcclError")
_SAYS_WHO = re.compile(r"^rank \d+: ")

_FULL = "a full /dev/shm (df /dev/shm; in a container docker run --shm-size=1g)"

_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory",
    signal.SIGSEGV: f"invalid memory access in native code; while ranks start, often {_FULL}",
    signal.SIGBUS: f"often {_FULL}",
    signal.SIGABRT: "abort() in native code, whose message stands above; for one about threads or processes: ulimit -u",
    signal.SIGXFSZ: "a file larger than allowed (ulimit -f)",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGILL: "an instruction that this CPU does not have",
}

# What an exception says that the launcher can add something to: which limit of the user's is reached, what to type.
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

    def alike(self, other: Raised | None) -> bool:
        """True if the other says the same, wherever it was raised."""
        return other is not None and (self.type, self._gist()) == (other.type, other._gist())

    def _gist(self) -> str:
        """The message, without what differs from rank to rank in an error of `collectives`."""
        if not self.type.startswith(_OURS):
            return self.message
        # Its first line says what happened; where the others stood, on those that follow, was seen at another moment.
        return _SAYS_WHO.sub("", self.message.partition("\n")[0])

    def __str__(self) -> str:
        first, *more = self.message.splitlines() or [""]
        hint = next((f" ({limit})" for words, limit in _ADVICE.items() if words in first), "")
        return f"{self.type}: {first}{' [...]' if more else ''}{hint}" if first else self.type


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that went wrong; `str` of it is the sentence for the user.

    at: when the launcher learned of it, in seconds
    """

    at: float

    @property
    def code(self) -> int:
        """The job's exit code, if this is the root cause."""
        return 1


@dataclass(frozen=True, kw_only=True)
class RankFailed(Failure):
    """A rank raised, ended with a status other than 0, or ended with 0 and let others wait for it.

    host: where it ran, "" where that goes without saying
    status: exit code, or minus the signal that killed it
    asked: True if its agent had got a signal from outside, most likely from an engine that ends everything
    memory: how much it had, if it may have been too much
    missed_by: ranks that wait for it in `collectives.init`, to which it did not come
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
            wait = "waits" if len(self.missed_by) == 1 else "wait"
            return f"{who} exited with code 0 before collectives.init(), where {name_ranks(self.missed_by)} {wait}"
        if self.status == 0:
            return f"{who} exited with code 0 while others were waiting (os._exit?)"
        return f"{who} exited with code {self.status}"

    @property
    def code(self) -> int:
        return 1 if self.raised is not None or not self.status else exit_code(self.status)


@dataclass(frozen=True, kw_only=True)
class AgentLost(Failure):
    """An agent, or the reaper above it, has gone without a word about its rank's end.

    host: where it ran, "" where that goes without saying
    started: pid of that of the two which the engine had started, and knows
    """

    rank: int
    pid: int
    host: str = ""
    started: int | None = None

    def __str__(self) -> str:
        return f"the agent of {name_rank(self.rank, self.pid, self.host)} died, and its rank with it"


@dataclass(frozen=True, kw_only=True)
class EngineLost(Failure):
    """An agent's parent, a process of the engine, has died.

    host: where, "" where that goes without saying; above: it is the reaper above the engine, which goes with it
    """

    name: str
    pid: int
    host: str = ""
    above: bool = False

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"{self.name or 'the MPI engine'}{where} (pid {self.pid}), which had started the ranks, died"


@dataclass(frozen=True, kw_only=True)
class EngineEnded(Failure):
    """The engine ended before the ranks did.

    missing: ranks that had not started yet; name: what the engine is called
    """

    pid: int
    status: int
    missing: tuple[int, ...] = ()
    name: str = "mpiexec"

    def __str__(self) -> str:
        how = f"exited with code {self.status}"
        if self.status < 0:
            how = f"was killed by {signal_name(-self.status, hint=False)}"
        before = f"before {name_ranks(self.missing)} had started" if self.missing else "while ranks were running"
        return f"{self.name} (pid {self.pid}) {how} {before}"

    @property
    def code(self) -> int:
        return exit_code(self.status) or 1


@dataclass(frozen=True, kw_only=True)
class NotStarted(Failure):
    """Ranks that did not come up in time, or not as the ranks that they should be. message: the sentence"""

    message: str
    code: int = 1

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class TimeLimit(Failure):
    """The job took longer than it was given. code: that of `timeout` of the GNU coreutils"""

    seconds: float
    code: int = 124

    def __str__(self) -> str:
        return f"the job took longer than {self.seconds:g} s"


@dataclass(frozen=True, kw_only=True)
class NotStopped(Failure):
    """Ranks that went on, and had to be ended, when others had stopped as they were asked to.

    seconds: for how long they were waited for
    """

    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        who = name_ranks(self.ranks)
        return f"{who} went on for {duration(self.seconds)} after the others had stopped as asked (more time: --grace)"


@dataclass(frozen=True, kw_only=True)
class Hung(Failure):
    """Nothing moved for too long.

    ranks: those for which the others wait, as far as known; message: the sentence
    """

    ranks: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class HeartbeatLost(Failure):
    """No heartbeat comes from ranks any more.

    ranks: which; hosts: theirs, if all ranks there are silent; none if that is not so, or the job has one host only
    seconds: for how long; limit: that is longer than `Job.heartbeat_timeout`
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float
    limit: bool = False

    def __str__(self) -> str:
        more = " (more time: --heartbeat-timeout)" if self.limit else ""
        silence = f"no heartbeat for {duration(self.seconds)}"
        if self.hosts:
            hosts = f"host{'s' * (len(self.hosts) > 1)} {', '.join(self.hosts)}"
            return f"lost {hosts} with {name_ranks(self.ranks)}: {silence}, so it or its network is down{more}"
        return f"lost {name_ranks(self.ranks)}: {silence}, so its agent is stopped or its network is down{more}"


def root_cause(failures: Sequence[Failure], engine_output: bytes = b"") -> Failure:
    """The failure that explains the others: the first, unless an engine or an agent died and took that one with it.

    An engine kills all ranks and agents when one of its processes dies, and all of that is learned within a moment.

    failures: in the order in which they were learned, at least one
    engine_output: what the engine printed; both kinds name the pid of the process whose death they noticed
    """
    first = failures[0]
    near = [each for each in failures if each.at - first.at <= _SAME_CAUSE]
    ranks = [each for each in failures if isinstance(each, RankFailed) and not each.asked]
    agents = [each for each in near if isinstance(each, AgentLost)]
    named = [each for each in agents if re.search(rb"PID %d\b" % (each.started or each.pid), engine_output)]
    engines = [each for each in failures if isinstance(each, EngineEnded)]
    killed = [each for each in engines if each in near and each.status < 0]
    lost = sorted((each for each in near if isinstance(each, EngineLost)), key=lambda each: not each.above)
    # The first row whose condition holds and whose list is not empty: that list's first failure.
    table: tuple[tuple[bool, Sequence[Failure]], ...] = (
        (True, [each for each in failures if isinstance(each, HeartbeatLost)]),
        (is_echo(first), [*(each for each in ranks if not is_echo(each)), first]),
        # The engine wrote to a process of its own that had gone.
        (isinstance(first, EngineEnded) and first.status == -signal.SIGPIPE, [*ranks, first]),
        # An MPI whose engine dies while it starts ends its rank with a code of its own.
        (isinstance(first, RankFailed) and first.raised is None and (first.status or 0) > 0 and not first.asked, lost),
        (not _may_be_collateral(first), [first]),
        (True, [*killed, *lost, *named, *(each for each in engines if each.missing), *agents, first]),
    )
    return next(found[0] for holds, found in table if holds and found)


def is_echo(failure: Failure) -> bool:
    """True if a rank raised only because it waited for another, which has failed or left."""
    return isinstance(failure, RankFailed) and failure.raised is not None and failure.raised.type in _ECHOES


def may_follow_a_loss(failure: Failure) -> bool:
    """True for what ranks and the engine do when they miss a host: time limits, lost connections, MPI's own end."""
    if isinstance(failure, RankFailed):
        if failure.raised is not None:
            return failure.raised.type in _MISSES
        return failure.asked or failure.missed_by != ()
    return isinstance(failure, AgentLost | EngineLost | EngineEnded | NotStarted)


def _may_be_collateral(failure: Failure) -> bool:
    if isinstance(failure, RankFailed):
        return failure.raised is None and failure.asked
    return isinstance(failure, AgentLost | EngineLost | EngineEnded)


def others(failures: Sequence[Failure], first: Failure) -> str:
    """One line on the ranks that failed after the first, "" if none did."""
    seen = {first.rank} if isinstance(first, RankFailed | AgentLost) else set()
    words, same = [], []
    for failure in failures:
        if isinstance(failure, RankFailed) and failure.rank not in seen:
            seen.add(failure.rank)
            if failure.raised is not None and isinstance(first, RankFailed) and failure.raised.alike(first.raised):
                same.append(failure.rank)
            else:
                words.append(str(failure))
    if same:
        words.insert(0, f"{name_ranks(same)} raised the same")
    if not words:
        return ""
    return "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")


def exit_code(status: int) -> int:
    """The exit code of a shell for a process that ended with `status` (minus the signal that killed it).

    >>> [exit_code(status) for status in (0, 3, -9, -15)]
    [0, 3, 137, 143]
    """
    return status if status >= 0 else 128 - status


def signal_name(number: int, hint: bool = True) -> str:
    """A signal's name and number, and what it usually means.

    >>> signal_name(9)
    'SIGKILL (signal 9); often the kernel, out of memory'
    """
    try:
        name = f"{signal.Signals(number).name} (signal {number})"
    except ValueError:  # a real-time signal
        return f"signal {number}"
    meaning = _HINTS.get(signal.Signals(number)) if hint else None
    return f"{name}; {meaning}" if meaning else name


def name_rank(rank: int, pid: int, host: str = "") -> str:
    """`rank 3 (pid 4711)`, or `rank 3 on node7 (pid 4711)`."""
    return f"rank {rank} on {host} (pid {pid})" if host else f"rank {rank} (pid {pid})"


def name_ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"ranks {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `1200 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


class Stop(NamedTuple):
    """How a job stopped.

    step: after which it did, None if the ranks did not say so, or not the same
    late: ranks that ended otherwise, in order: they were killed, or crashed on their way
    """

    step: int | None
    late: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The sentence for it.

        >>> print(Stop(120))
        stopped as asked at step 120, state saved: start the same command to go on
        """
        if self.late:
            were = "was" if len(self.late) == 1 else "were"
            return (
                f"{name_ranks(self.late)} {were} ended before all had saved (more time: --grace): start the same "
                "command to go on from the checkpoint before"
            )
        at = "" if self.step is None else f" at step {self.step}"
        return f"stopped as asked{at}, state saved: start the same command to go on"


def stop_of(ends: Mapping[int, int | None], steps: Collection[int] = ()) -> Stop | None:
    """How a job of which all ranks have ended stopped; None if no rank says that it stopped as asked.

    A rank that had done all its work when the others were asked has nothing to save.

    ends: how each rank ended: its exit code, minus the signal that killed it, None if unknown
    steps: after which ranks say that they stopped
    """
    if STOPPED not in ends.values():
        return None
    late = tuple(sorted(rank for rank, status in ends.items() if status not in (0, STOPPED)))
    return Stop(next(iter(steps)) if len({*steps}) == 1 else None, late)
