"""The launcher's errors.

UsageError      the job as asked for cannot be started; `ddp-launch` prints the message and exits with 2
RankError       a call of `launcher.run` failed otherwise than by an exception that can be raised again
StartError      an agent cannot start its rank; the launcher reports it as wrong use

An agent imports this before it forks its rank, so it imports nothing.
"""

from __future__ import annotations

_MARK = "ddp-launch refuses: "
#: What is wrong with a network between hosts on which small messages arrive and a job does not start all the same.
LARGE_PACKETS = "a network may drop large packets alone: ping -M do -s 1472 HOST"


class UsageError(Exception):
    """The job as asked for cannot be started; the message is one sentence for the user. `ddp-launch` exits with 2."""


class RankError(RuntimeError):
    """A call on several ranks failed otherwise than by an exception that could be raised again here.

    Also the cause (`__cause__`) of an exception that was: then it has the rank's traceback.
    """


class StartError(Exception):
    """The rank cannot be started here; the message is one sentence for the user."""


def start_error_line(error: StartError) -> str:
    """What the agent prints."""
    return f"{_MARK}{error}"


def find_start_error(engine_output: str) -> str | None:
    """The sentence of the first agent that printed one; None if there is none."""
    _, found, rest = engine_output.partition(_MARK)
    sentence, ended, _ = rest.partition("\n")
    return sentence.rstrip("\r") if found and ended else None
