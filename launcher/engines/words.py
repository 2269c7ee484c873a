"""What engines, ssh and keepers say when a job cannot start, put into one sentence. Pure: their words in, ours out."""

from __future__ import annotations

import re

from launcher import refusal

_SSH = (
    re.compile(r"^ssh: connect to host (?P<host>\S+) port \d+: (?P<why>.+?)\r?$", re.MULTILINE),
    re.compile(r"^ssh: Could not resolve hostname (?P<host>[^\s:]+): (?P<why>.+?)\r?$", re.MULTILINE),
    re.compile(r"^(?:\S+@)?(?P<host>[^\s@:]+): (?P<why>Permission denied \(.+?\))\.?\r?$", re.MULTILINE),
    re.compile(r"^(?P<why>Connection (?:closed|reset)) by (?:remote host |\S+ )?(?P<host>\S+) port \d+", re.MULTILINE),
)
_HOST_KEY = re.compile(r"^Host key verification failed\.\r?$", re.MULTILINE)


def explain(chatter: str) -> str | None:
    """The sentence for the user, if what has been said so far tells why ranks do not start; None if not.

    >>> explain("ssh: connect to host b port 22: No route to host\\n")
    'host b cannot be reached by ssh: No route to host'
    """
    complete = chatter[: chatter.rfind("\n") + 1]
    if refused := refusal.heard(complete):
        return refused
    for pattern in _SSH:
        if match := pattern.search(complete):
            return f"host {match['host']} cannot be reached by ssh: {match['why']}"
    if _HOST_KEY.search(complete):
        return "a host cannot be reached by ssh: host key verification failed (ssh to each of them once, by hand)"
    return None
