"""Finds out why a job cannot start: makes one sentence of the output of engines, ssh and agents."""

from __future__ import annotations

import re

from launcher import errors

# Messages of ssh about a host that it cannot reach.
_SSH = (
    re.compile(r"^ssh: connect to host (?P<host>\S+) port \d+: (?P<why>.+?)\r?$", re.MULTILINE),
    re.compile(r"^ssh: Could not resolve hostname (?P<host>[^\s:]+): (?P<why>.+?)\r?$", re.MULTILINE),
    re.compile(r"^(?:\S+@)?(?P<host>[^\s@:]+): (?P<why>Permission denied \(.+?\))\.?\r?$", re.MULTILINE),
    re.compile(r"^(?P<why>Connection (?:closed|reset)) by (?:remote host |\S+ )?(?P<host>\S+) port \d+", re.MULTILINE),
)
# A message of hydra: it may notice that ssh has ended before it forwards ssh's own message.
_NO_PROXY = re.compile(r"\bLaunch proxy failed\.$", re.MULTILINE)
_HOST_KEY = re.compile(r"^Host key verification failed\.\r?$", re.MULTILINE)


def explain_start_failure(engine_output: str) -> str | None:
    """The sentence for the user; None if the output so far does not show why ranks do not start.

    >>> explain_start_failure("ssh: connect to host b port 22: No route to host\\n")
    'host b cannot be reached by ssh: No route to host'
    """
    complete = engine_output[: engine_output.rfind("\n") + 1]
    if refused := errors.find_start_error(complete):
        return refused
    if match := _search_ssh_error(complete):
        return f"host {match['host']} cannot be reached by ssh: {match['why']}"
    if _HOST_KEY.search(complete):
        return "a host cannot be reached by ssh: host key verification failed (ssh to each of them once, by hand)"
    if _NO_PROXY.search(complete):
        return "mpiexec could not start on one of the hosts, and does not say why: ssh to each of them by hand shows it"
    return None


def unreachable_host(engine_output: str) -> str | None:
    """The name of a host that ssh did not reach, according to its messages; None if they name no host.

    >>> unreachable_host("ssh: connect to host b port 22: No route to host\\n")
    'b'
    """
    match = _search_ssh_error(engine_output)
    return match["host"] if match else None


def _search_ssh_error(engine_output: str) -> re.Match[str] | None:
    return next((match for pattern in _SSH if (match := pattern.search(engine_output))), None)
