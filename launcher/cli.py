"""`ddp-launch`: from the words of a command line to a job, and from a job's end to an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from launcher.job import GRACE, Job, UsageError

HELP = f"""\
usage: ddp-launch [-n N] SCRIPT ARGS...
       ddp-launch [-n N] -m MODULE ARGS...
       ddp-launch --config FILE [ARGS...]

Starts N ranks of a Python program on this machine and watches over them: whole lines, the first
failure explained, nothing left behind.

  -n N           number of ranks (1)
  -m MODULE      run a module, as `python -m` does
  --config FILE  a job in TOML: [launch] has n, script or module, grace, trace; [args] goes to the script
  --grace S      seconds between asking the ranks to end (Ctrl-C, SIGTERM) and killing them ({GRACE:g})
  --trace DIR    what every rank did in each step, on one clock: DIR/trace.json, for ui.perfetto.dev, and a picture
  --version      print the version
  --help         print this

Options of ddp-launch come before SCRIPT; what follows it belongs to the script.
Exit code: 0; that of the first rank that failed; 128 + N if signal N killed it; 1 for an exception;
2 for wrong use; 130 after Ctrl-C.
"""

_FLAGS = ("--help", "-h", "--version")
_VALUED = ("-n", "-m", "--config", "--grace", "--trace")
_SWEEP_LIMIT = 1.0


class Words(NamedTuple):
    """A command line, taken apart.

    options: option name to its value ("" for a flag)
    rest: SCRIPT ARGS..., or the arguments of a module or of a configured job
    """

    options: dict[str, str]
    rest: tuple[str, ...]


def take_apart(argv: Sequence[str]) -> Words:
    """Separates our options from what belongs to the script.

    >>> take_apart(["-n", "4", "train.py", "-n", "7"])
    Words(options={'-n': '4'}, rest=('train.py', '-n', '7'))
    Raises: UsageError for an option that is none of ours, or lacks its value.
    """
    options: dict[str, str] = {}
    words = list(argv)
    while words and words[0].startswith("-") and "-m" not in options:
        name, attached, value = words[0].partition("=")
        if name[:2] in ("-n", "-m") and len(name) > 2:
            name, attached, value = words[0][:2], "=", words[0][2:]
        if words[0] == "--":
            return Words(options, tuple(words[1:]))
        if name not in _FLAGS + _VALUED:
            if "--config" in options:
                break  # the configured script's first argument
            raise UsageError(f"unknown option {words[0]}{nearest(name, _FLAGS + _VALUED)}")
        words.pop(0)
        if name in _VALUED and not attached:
            if not words:
                raise UsageError(f"option {name} needs a value")
            value = words.pop(0)
        if name in _FLAGS and attached:
            raise UsageError(f"option {name} takes no value")
        options[name] = value
    return Words(options, tuple(words))


def nearest(name: str, known: Sequence[str]) -> str:
    """` (did you mean ...?)`, or nothing if `name` is like none of the known ones."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def parse(argv: Sequence[str]) -> Job:
    """The job that a command line asks for.

    Raises: UsageError, in one sentence.
    """
    options, rest = take_apart(argv)
    settings: dict[str, object] = {}
    if "--config" in options:
        from launcher.config import load

        settings = load(options["--config"])
    if "-m" in options:
        settings.pop("script", None)
        settings["module"] = options["-m"]
    elif rest and "script" not in settings and "module" not in settings:
        settings["script"], rest = rest[0], rest[1:]
    if "-n" in options:
        settings["n"] = _number("-n", options["-n"], int, "a whole number of ranks")
    if "--grace" in options:
        settings["grace"] = _number("--grace", options["--grace"], float, "a number of seconds")
    if "--trace" in options:
        settings["trace"] = options["--trace"]
    configured = settings.pop("args", ())
    assert isinstance(configured, tuple)
    return Job(**settings, args=(*configured, *rest))  # type: ignore[arg-type]  # checked above and in launcher.config


def _number(name: str, text: str, kind: type, what: str) -> object:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{name} should be {what}, not {text!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from launcher.process import become_subreaper, childless, children_of, parents, sweep

    argv = sys.argv[1:] if argv is None else argv
    try:
        options = take_apart(argv).options
        if "--help" in options or "-h" in options:
            print(HELP, end="")
            return 0
        if "--version" in options:
            from collectives.version import __version__

            print(f"ddp-launch {__version__}")
            return 0
        job = parse(argv)
        from launcher.watch import launch

        # If the guard is killed, what it guarded comes to us; what this process had before it became us is not ours.
        before = frozenset() if childless() else frozenset(children_of(parents(), os.getpid()))
        become_subreaper()
        try:
            return launch(job)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job is over, and so is this process, in a moment
            sweep(_SWEEP_LIMIT, spare=before)
    except UsageError as error:
        print(f"ddp-launch: {error}", file=sys.stderr)
        return 2
