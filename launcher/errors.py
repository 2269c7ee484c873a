"""The launcher's errors, and texts for messages: the line that reports a StartError, a hint, plurals.

UsageError      the job cannot be started as it was asked for; `ddp-launch` prints the message and exits with 2
RankError       a call of `launcher.run` failed; or the `__cause__` of a rank's exception, if `run` raises that
StartError      the engine, an agent or a rank cannot be started; the launcher reports it as wrong use

An agent imports this module before it forks its rank, so this module imports nothing.
"""

from __future__ import annotations

# Begins a line in the engine's output that reports a StartError.
_MARK = "ddp-launch refuses: "
#: A hint for jobs that do not start, or hang, although small messages between their hosts arrive.
LARGE_PACKETS = "a network may drop large packets alone: ping -M do -s 1472 HOST"


class UsageError(Exception):
    """A job cannot be started, restarted or resized, or a tool cannot run, as the user asked for.

    The message is one sentence for the user. `ddp-launch` exits with 2.
    """


class RankError(RuntimeError):
    """A call on several ranks failed, and no exception of a rank can be raised again here.

    If the rank's exception could be raised again, its `__cause__` is a RankError with the rank's traceback.
    """


class StartError(Exception):
    """A process of the job cannot be started on this host; the message is one sentence for the user."""


def start_error_line(error: StartError) -> str:
    """The line that an agent, the reaper or the engine's process prints for a StartError."""
    return f"{_MARK}{error}"


def find_start_error(engine_output: str) -> str | None:
    """The message of the first StartError in the engine's output; None if there is none, or its line is unfinished."""
    _, _, after_mark = engine_output.partition(_MARK)
    sentence, newline, _ = after_mark.partition("\n")
    return sentence.rstrip("\r") if newline else None


def plural(n: float, what: str) -> str:
    """A number with its noun: `plural(2, "core") == "2 cores"`."""
    return f"{n} {what}{'s' * (n != 1)}"
