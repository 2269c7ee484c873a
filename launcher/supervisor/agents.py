"""The agents of an attempt: accepts their connections, and handles what they and their ranks report."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from collectives.world import ATTEMPT, STOPPED
from launcher.diagnosis.failures import AgentLost, EngineLost, Failure, NotStarted, Raised, RankFailed
from launcher.diagnosis.liveness import SILENCE
from launcher.protocol import Message, ProtocolError, to_bytes, type_and_value
from launcher.supervisor.rank_table import RankProcess

if TYPE_CHECKING:
    from launcher.supervisor.attempt import Attempt

# All times are in seconds.
# After a rank has ended with 0 without leaving its world (os._exit), the others have this long to end, too. If all of
# them end in this time, it is no failure.
_EARLY_EXIT_LIMIT = 1.0


def authenticate(attempt: Attempt, fileno: int) -> None:
    """Handles an event of the listener. If an agent has authenticated itself, adds its rank to the attempt.

    The attempt fails if the agent's world has another size than the job, or if its rank has been added already.
    """
    authenticated = attempt.listener.serve(fileno)
    if authenticated is None:
        return
    channel, hello = authenticated
    process = RankProcess(channel, hello)
    rank = process.rank
    if int(hello["size"]) != attempt.job.size or rank in attempt.ranks:
        channel.close()
        world = f"but rank {rank} was told of a world of {hello['size']}"
        text = f"{attempt.engine.name} was to start {attempt.job.size} ranks, {world}"
        attempt.fail(NotStarted(message=text))
        return
    attempt.ranks[rank] = process
    if attempt.ranks.complete:
        attempt.deadlines.pop("start", None)
    attempt.stdin.rank_started(rank, attempt.ranks)
    attempt.observers.rank_started(rank, hello)
    if attempt.job.heartbeat_timeout is not None:
        channel.send({"heartbeat_timeout": max(attempt.job.heartbeat_timeout, SILENCE)})
    if attempt.ranks.debugging():
        channel.send({"pause": True})
    if attempt.end_command is not None:
        channel.send(attempt.end_command)
        attempt.released = False  # All other agents may have been released. This one must be released, too.


def receive(attempt: Attempt, process: RankProcess) -> None:
    """Called when an agent has sent something or closed its connection, or when queued messages can be sent to it."""
    process.channel.flush()
    try:
        messages = process.channel.receive()
    except ProtocolError:
        messages = None  # Nothing that it sends can be trusted.
    for message in messages or ():
        _handle_message(attempt, process, message)
    if messages is not None:
        return
    process.closed = True
    process.channel.close()
    if not process.over:
        _set_debugging(attempt, process, False)
        process.lost = True
        attempt.console.rank_ended(process.rank, -signal.SIGKILL)  # Prints the rank's unfinished lines.
        if not attempt.killed:
            process.disconnected = True
            attempt.fail(_agent_lost(process, process.agent))


def _handle_message(attempt: Attempt, process: RankProcess, message: Message) -> None:
    """Handles one message of an agent: about the agent itself, or a report of its rank."""
    observers = attempt.observers
    kind, value = type_and_value(message)
    match kind:
        case "out" | "err":
            observers.output(process.rank, kind, to_bytes(value))
        case "heartbeat":
            observers.heartbeat(process.rank, value, attempt.now)
        case "joining":
            _on_joining(attempt, process, value)
        case "stopped":
            process.step = value
        case "resizable":
            process.resizable = value
            if attempt.ranks.max_ranks is not None:  # All ranks are in their loop, so they have loaded the state.
                attempt.deadlines["copy"] = attempt.job_time(attempt.resizing.memory.copy_limit)
                if number := attempt.resizing.loaded(attempt.job_time()):
                    attempt.end_by_signal(number)
        case "resizing":
            process.resizing = True
            attempt.resizing.left(value, attempt.job_time())
        case "held":
            process.held = True
            if attempt.ranks.held:
                attempt.resizing.memory.complete(int(attempt.environ[ATTEMPT]))
        case "stacks":
            observers.stacks(process.rank, value)
        case "stdin_taken":
            attempt.stdin.acknowledged(process.rank, attempt.ranks)
        case "debugging":
            _set_debugging(attempt, process, value)
        case "quit":
            if not attempt.ending:
                attempt.console.say(f"{value}: ending the job (Ctrl-C kills it at once)")
                attempt.end_by_signal(signal.SIGINT)
        case "refused":
            process.leaving = True
            host = f"{process.host}: " if attempt.ranks.several_hosts() else ""
            attempt.fail(NotStarted(message=f"{host}{value}", code=2))
        case "raised":
            process.leaving = True
            attempt.fail(_rank_failed(process, raised=Raised(**value)))
        case "leaving":
            process.leaving = True
            _handle_exit(attempt, process, _rank_failed(process, status=value))
        case "signalled":
            process.asked = True
        case "parent_lost":
            failure: Failure = _agent_lost(process, value)
            if value == process.engine:
                failure = EngineLost(name=process.engine_name, pid=value, host=process.host)
            if not attempt.engine_may_end:
                attempt.fail(failure)
        case "end":
            _on_end(attempt, process, message)


def _on_joining(attempt: Attempt, process: RankProcess, limit: float | None) -> None:
    """Called when a rank begins or ends its wait in `collectives.init`.

    limit: the time limit of the wait (s); None: the wait has ended
    """
    process.joining = limit
    process.joined = process.joined or limit is None
    attempt.observers.joining(process.rank, limit is not None)
    if not (waiting := attempt.ranks.joining()):
        attempt.deadlines.pop("joining", None)
    elif not attempt.ending:
        attempt.deadlines.setdefault("joining", attempt.job_time(min(waiting.values())))
        _check_for_missed_ranks(attempt)


def _set_debugging(attempt: Attempt, process: RankProcess, debugging: bool) -> None:
    """Called when a rank enters or leaves a debugger, and when it has ended.

    While any rank is in a debugger, the ranks' time limits are paused. The job's clock is stopped, too, unless the
    launcher is ending the ranks.
    """
    before = attempt.ranks.debugging()
    process.debugging = debugging
    after = attempt.ranks.debugging()
    if after == before:
        return
    attempt.observers.debugging(after)
    if not after:
        attempt.clock.release(attempt.now)
    elif not attempt.ending:
        attempt.clock.hold(attempt.now)
    if bool(after) != bool(before):
        attempt.ranks.send({"pause": bool(after)})


def _on_end(attempt: Attempt, process: RankProcess, message: Message) -> None:
    """Handles the end of a rank.

    This is a failure if the status is neither 0 nor STOPPED, or if it is 0 and other ranks wait for this one.
    """
    _set_debugging(attempt, process, False)
    process.status = int(message["end"])
    attempt.observers.rank_ended(process.rank, process.status)
    # Once the launcher has begun to end the ranks, their statuses are no failures.
    if attempt.ending:
        return
    failure = _rank_failed(process, status=process.status, memory=message.get("memory"))
    if process.status != 0 and not process.leaving:
        _handle_exit(attempt, process, failure)
    elif process.status == 0 and message["deserted"] and attempt.early_exit is None:
        attempt.early_exit = failure
        attempt.deadlines["early exit"] = attempt.job_time(_EARLY_EXIT_LIMIT)
    else:
        _check_for_missed_ranks(attempt)


def _check_for_missed_ranks(attempt: Attempt) -> None:
    """Fails if a rank has ended with 0 without passing `collectives.init`, while other ranks wait there."""
    ranks = attempt.ranks
    waiting = tuple(ranks.joining())
    for process in ranks.values():
        if process.status == 0 and not process.joined and waiting:
            attempt.fail(_rank_failed(process, status=0, missed_by=waiting))
            return


def _handle_exit(attempt: Attempt, process: RankProcess, failure: RankFailed) -> None:
    """Handles a rank that ends with a status other than 0: this is a failure, unless the status is STOPPED."""
    if failure.status != STOPPED:
        attempt.fail(failure)
        return
    process.saved = True
    if not attempt.ending:
        attempt.deadlines.setdefault("stopping", attempt.job_time(attempt.job.grace))


def _rank_failed(process: RankProcess, **details: Any) -> RankFailed:
    return RankFailed(
        rank=process.rank,
        pid=process.pid,
        host=process.host,
        asked=process.asked,
        **details,
    )


def _agent_lost(process: RankProcess, pid: int) -> AgentLost:
    return AgentLost(rank=process.rank, pid=pid, host=process.host, started=process.started)
