"""Why a rank cannot be started, in one sentence. A keeper says it where the engine's words are read, for want of a way.

Apart from everything else, because a keeper loads it before it forks.
"""

from __future__ import annotations

_MARK = "ddp-launch refuses: "


class Refusal(Exception):
    """The rank cannot be started here; the message is one sentence for the user."""


def line(refusal: Refusal) -> str:
    """What the keeper prints."""
    return f"{_MARK}{refusal}"


def heard(chatter: str) -> str | None:
    """The sentence of the first keeper that printed one; None if there is none."""
    _, found, rest = chatter.partition(_MARK)
    sentence, ended, _ = rest.partition("\n")
    return sentence.rstrip("\r") if found and ended else None
