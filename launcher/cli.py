"""`ddp-launch`: from the command line to a job, and from a job's end to an exit code."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from launcher.arguments import ArgumentParser
from launcher.config import Layer
from launcher.errors import UsageError
from launcher.job import Job
from launcher.options import ALIASES, ELSEWHERE, GROUPS, KEYS, OPTIONS, Option

_SWEEP_LIMIT = 1.0

_USAGE = """\
ddp-launch [OPTIONS] SCRIPT ARGS...      ddp-launch [OPTIONS] -m MODULE ARGS...
       ddp-launch --config FILE [OPTIONS] [ARGS...]"""
_WHAT = "Starts the ranks of a Python program, here or on other hosts, and explains how they fail."
_MORE = "Options come before SCRIPT. Exit code: 0, that of the first rank that failed, or 2 for wrong use."
_ALL = """\
Options come before SCRIPT; what follows it belongs to the script. `--` ends the options.
The command line wins over --set, and --set over the job file. In parentheses: what holds otherwise.

Exit code: 0; that of the first rank that failed; 128 + N if signal N killed it; 1 for an exception;
2 for wrong use; 124 after --timeout; 130 after Ctrl-C.
"""
_DEFAULTS = {field.name: field.default for field in fields(Job)}
_METAVARS = {name: option.metavar for option in OPTIONS for name in (option.name, *ALIASES.get(option.name, ()))}


def parser(everything: bool = False) -> ArgumentParser:
    """The command line, as the table of options has it. everything: its help has all options, in groups"""
    made = ArgumentParser("ddp-launch", usage=_USAGE, description=_WHAT, epilog=_ALL if everything else _MORE)
    for heading, options in GROUPS.items():
        group = made.add_argument_group(heading) if everything else made
        for option in options:
            text = f"{option.help} ({default(option)})" if default(option) else option.help
            group.add_argument(
                option.name,
                *ALIASES.get(option.name, ()),
                help=text if everything or option.common else argparse.SUPPRESS,
                **_value(option),
            )
    return made


def _value(option: Option) -> dict[str, Any]:
    """How argparse is to take an option's value."""
    dest = {"dest": option.key} if option.key else {}
    if not option.metavar:
        return {"action": "store_const", "const": option.value, **dest}

    def read(text: str) -> Any:
        try:
            return option.kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be {option.kind.what}, not {text!r}") from None

    return {"type": read, "metavar": option.metavar, "action": "append" if option.name == "--set" else "store", **dest}


def default(option: Option) -> str:
    """What holds without an option, as it would be given; "" if that is nothing in particular."""
    value = _DEFAULTS.get(option.key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return value if isinstance(value, str) else f"{value:g}"


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options and their values, and the words after them, which are the script's.

    >>> split(["-n", "4", "train.py", "-n", "7"])
    (['-n', '4'], ['train.py', '-n', '7'])
    Raises: UsageError for an option that is none of ours; after --config it is the script's first word.
    """
    words, at, names = list(argv), 0, []
    while words[at:] and words[at].startswith("-") and words[at] != "--":
        name = words[at].partition("=")[0]
        if name not in _METAVARS and name[:2] not in ("-m", "-n"):  # -n4
            if "--config" in names:
                break
            meant = ELSEWHERE.get(name)
            raise (
                UsageError(f"unknown option {words[at]} (did you mean {meant}?)")
                if meant
                else parser().unknown(words[at:])
            )
        names.append(name)
        at += 2 if _METAVARS.get(words[at]) else 1
        if name[:2] == "-m":  # as with `python -m`, the rest is the module's
            return words[:at], words[at:]
    return words[:at], words[at + (words[at : at + 1] == ["--"]) :]


def read(argv: Sequence[str]) -> dict[str, Any]:
    """The options that were given, and `rest`: SCRIPT ARGS..., or the arguments of a module or of a configured job.

    >>> read(["-n", "4", "train.py", "-n", "7"])
    {'n': 4, 'rest': ['train.py', '-n', '7']}
    Raises: UsageError for an option that is none of ours, or lacks its value.
    """
    options, rest = split(argv)
    return {**vars(parser().parse_args(options)), "rest": rest}


def layer_of(given: dict[str, Any]) -> Layer:
    """What a command line says of the job, and the job file and `--set` in it.

    Raises: UsageError, in one sentence.
    """
    layer = Layer({}, {})
    if "config" in given or "set" in given:
        from launcher import config  # here, because reading TOML takes milliseconds

        if "config" in given:
            layer = config.load(given["config"])
        layer = config.changes(given.get("set", ())).over(layer)
    launch = {key: value for key, value in given.items() if key in KEYS}
    rest = given["rest"]
    if rest and not {"script", "module"} & (layer.launch.keys() | launch.keys()):
        launch["script"], *rest = rest
    return Layer(launch, {}, tuple(rest)).over(layer)


def parse(argv: Sequence[str]) -> Job:
    """The job that a command line asks for. Raises: UsageError, in one sentence."""
    return layer_of(read(argv)).job()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        given = read(sys.argv[1:] if argv is None else argv)
        if "help" in given or "help_all" in given:
            return _print(parser(everything="help_all" in given).format_help())
        if "version" in given:
            from collectives.version import __version__

            return _print(f"ddp-launch {__version__}\n")
        layer = layer_of(given)
        job = layer.job()
        from launcher.engines import resolve_size  # here, because who made a mistake need not wait for it

        job = resolve_size(job, os.environ)
        if "print_config" in given:
            from launcher import config

            return _print(config.show(job, layer))
        return _print(show(job, os.environ)) if "dry_run" in given else _run(job)
    except UsageError as error:
        _complain(str(error))
        return 2


def _print(text: str) -> int:
    """Prints what was asked for; returns the exit code."""
    try:
        try:
            print(text, end="", flush=True)
        except UnicodeEncodeError:  # a name for which the output's encoding has no letters: as the file system has it
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
            sys.stdout.flush()
        return 0
    except OSError as error:
        # Else Python would try once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE  # its reader has gone, as with `| head`
        _complain(f"the output cannot be written: {error.strerror}")
        return 1


def _complain(text: str) -> None:
    """Says what went wrong, if stderr can be written to; the exit code says it, too."""
    if sys.stderr is None:
        return  # closed; print would take stdout instead
    try:
        print(f"ddp-launch: {text}", file=sys.stderr)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python would try once more, and end with a code of its own


def _run(job: Job) -> int:
    from launcher.linux import become_subreaper, childless, children_of, parents, remove_stale_segments, sweep
    from launcher.supervisor.supervisor import launch

    began = time.time()
    # A parent that ignores it hands that down, and no child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # If the reaper is killed, what it guarded comes to us; what this process had before it became us is not ours.
    before = frozenset() if childless() else frozenset(children_of(parents(), os.getpid()))
    become_subreaper()
    try:
        return launch(job)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job is over, and so is this process, in a moment
        sweep(_SWEEP_LIMIT, spare=before)
        remove_stale_segments(began)


def show(job: Job, environ: Mapping[str, str]) -> str:
    """The command for a settled job, and what it adds to the environment `environ`.

    Raises: UsageError if there is no engine for it.
    """
    from launcher import engines  # here, because most jobs are run, and not shown
    from launcher.protocol import LAUNCHER_PID
    from launcher.supervisor.environment import (
        agent,
        agents_environment,
        host_of_rank_0,
        meeting,
        ranks_environment,
    )

    engine = engines.choose_engine(job, environ)
    agents = agents_environment(job, engine, "HOST:PORT", "HIDDEN") | {LAUNCHER_PID: "PID"}
    there = meeting(environ, host_of_rank_0(job, engine, environ), "PORT")
    ranks = {**environ, **ranks_environment(job, 0), **there, **agents}
    then = engine.environment(ranks, "SCRATCH")
    return written(engine.command(agent(job), then), environ, then)


def written(command: Sequence[str], before: Mapping[str, str], then: Mapping[str, str]) -> str:
    """A command in an environment, as a shell takes it.

    >>> print(written(["mpiexec", "-n", "2", "a b"], {"HOME": "/", "X": "1"}, {"HOME": "/", "Y": "2"}), end="")
    env \\
        -u X \\
        Y=2 \\
        mpiexec -n 2 'a b'
    before: the environment as it is; then: as the command finds it
    """
    gone = [f"-u {shlex.quote(name)}" for name in before if name not in then]
    new = [f"{name}={shlex.quote(value)}" for name, value in then.items() if before.get(name) != value]
    return " \\\n    ".join(("env", *gone, *new, shlex.join(command))) + "\n"
