"""What a rank reports to its agent (`collectives.world.report`), read from the pipe between them.

Any program of the rank's may write to that pipe by mistake, as a file descriptor that it has inherited or guessed: what
is no report is left out, and the job goes on.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # not of `typing`, whose import would cost a keeper a tenth of its memory
if TYPE_CHECKING:
    from launcher.wire import Message

# By name, the type of what is reported.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "raised": dict,
    "refused": str,
    "leaving": int,
    "stopped": int,
    "joining": (int, float, type(None)),
    "joined": bool,
    "left": bool,
    "flight": int,
    "debugging": bool,
    "editing": bool,
    "passed": int,
    "quit": str,
}
_RAISED = {"type", "message", "traceback"}
# Longer than any report: `launcher.rank` shortens what an exception says.
_LONGEST = 1 << 20


class Reports:
    """The reports in a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The reports that `data` completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST:]
        return [report for line in lines if (report := parse(line)) is not None]


def parse(line: bytes) -> Message | None:
    """The report that a line holds; None if it is none.

    >>> parse(b'{"leaving": 3}'), parse(b'{"leaving": "x"}'), parse(b"hello")
    ({'leaving': 3}, None, None)
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or len(found) != 1:
        return None
    ((name, value),) = found.items()
    if name not in _TYPES or not isinstance(value, _TYPES[name]):
        return None
    if isinstance(value, dict) and (
        value.keys() != _RAISED or not all(isinstance(text, str) for text in value.values())
    ):
        return None
    return found
