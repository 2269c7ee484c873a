"""`ddp-launch`: from the command line to a job, and from a job's end to an exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from launcher.config import Layer
from launcher.errors import UsageError
from launcher.job import Job
from launcher.options import BY_NAME, ELSEWHERE, GROUPS, OPTIONS, Option, nearest

_SWEEP_LIMIT = 1.0


class Words(NamedTuple):
    """A command line, taken apart.

    options: each option as often as it was given, and its value ("" if it takes none)
    rest: SCRIPT ARGS..., or the arguments of a module or of a configured job
    """

    options: tuple[tuple[str, str], ...]
    rest: tuple[str, ...]

    def all(self, name: str) -> list[str]:
        """The values of every time that the option was given."""
        return [value for each, value in self.options if each == name]


def take_apart(argv: Sequence[str]) -> Words:
    """Separates our options from what belongs to the script.

    >>> take_apart(["-n", "4", "train.py", "-n", "7"])
    Words(options=(('-n', '4'),), rest=('train.py', '-n', '7'))
    Raises: UsageError for an option that is none of ours, or lacks its value.
    """
    options: list[tuple[str, str]] = []
    words = list(argv)
    while words and words[0].startswith("-"):
        if words[0] == "--":
            return Words(tuple(options), tuple(words[1:]))
        name, attached, value = words[0].partition("=")
        if name[:2] in ("-n", "-m") and len(name) > 2 and name not in BY_NAME:
            name, attached, value = words[0][:2], "=", words[0][2:]
        option = BY_NAME.get(name)
        if option is None:
            if any(given == "--config" for given, _ in options):
                break  # the configured script's first argument
            hint = f" (did you mean {ELSEWHERE[name]}?)" if name in ELSEWHERE else nearest(name, BY_NAME)
            raise UsageError(f"unknown option {words[0]}{hint}")
        words.pop(0)
        if option.metavar and not attached:
            if not words or words[0] in BY_NAME:
                raise UsageError(f"option {name} needs a value")
            value = words.pop(0)
        if attached and not option.metavar:
            raise UsageError(f"option {name} takes no value")
        options.append((option.name, value))
        if name == "-m":
            break  # as with `python -m`, the rest is the module's
    return Words(tuple(options), tuple(words))


def layer_of(words: Words) -> Layer:
    """What a command line says of the job, and the job file and `--set` in it.

    Raises: UsageError, in one sentence.
    """
    layer = Layer({}, {})
    files, changes = words.all("--config"), words.all("--set")
    if files or changes:
        from launcher import config  # here, because reading TOML takes milliseconds

        if files:
            layer = config.load(files[-1])
        layer = config.changes(changes).over(layer)
    launch = {}
    for name, text in words.options:
        option = BY_NAME[name]
        if option.key:
            launch[option.key] = _value(option, text)
    rest = words.rest
    if rest and not {"script", "module"} & (layer.launch.keys() | launch.keys()):
        launch["script"], rest = rest[0], rest[1:]
    return Layer(launch, {}, rest).over(layer)


def parse(argv: Sequence[str]) -> Job:
    """The job that a command line asks for. Raises: UsageError, in one sentence."""
    return layer_of(take_apart(argv)).job()


def _value(option: Option, text: str) -> object:
    if not option.metavar:
        return option.value
    try:
        return option.kind.read(text)
    except ValueError:
        raise UsageError(f"{option.name} should be {option.kind.what}, not {text!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        words = take_apart(sys.argv[1:] if argv is None else argv)
        if (text := _information(words)) is not None:
            return _print(text)
        layer = layer_of(words)
        job = layer.job()
        from launcher.engines import resolve_size  # here, because who made a mistake need not wait for it

        job = resolve_size(job, os.environ)
        if (text := _preview(words, layer, job)) is not None:
            return _print(text)
        return _run(job)
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


def _information(words: Words) -> str | None:
    """What is asked for instead of a job, None if nothing is."""
    if words.all("--help") or words.all("--help-all"):
        return full() if words.all("--help-all") else short()
    if words.all("--version"):
        from collectives.version import __version__

        return f"ddp-launch {__version__}\n"
    return None


def _preview(words: Words, layer: Layer, job: Job) -> str | None:
    """What is asked for instead of running the job, None if nothing is. layer: what the job was made of"""
    if words.all("--print-config"):
        from launcher import config

        return config.show(job, layer)
    if words.all("--dry-run"):
        return show(job, os.environ)
    return None


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


_USAGE = """\
usage: ddp-launch [OPTIONS] SCRIPT ARGS...      ddp-launch [OPTIONS] -m MODULE ARGS...
       ddp-launch --config FILE [OPTIONS] [ARGS...]

Starts the ranks of a Python program, here or on other hosts, and explains how they fail.

"""
_MORE = """\

Options come before SCRIPT. Exit code: 0, that of the first rank that failed, or 2 for wrong use.
"""
_ALL = """\

Options come before SCRIPT; what follows it belongs to the script. `--` ends the options.
The command line wins over --set, and --set over the job file. In parentheses: what holds otherwise.

Exit code: 0; that of the first rank that failed; 128 + N if signal N killed it; 1 for an exception;
2 for wrong use; 124 after --timeout; 130 after Ctrl-C.
"""
_DEFAULTS = {field.name: field.default for field in fields(Job)}


def short() -> str:
    """The common options."""
    return _USAGE + _table(option for option in OPTIONS if option.common) + _MORE


def full() -> str:
    """All options, in groups."""
    return _USAGE + "\n".join(f"{heading}:\n{_table(group)}" for heading, group in GROUPS.items()) + _ALL


def usage(option: Option) -> str:
    """How it is given: `--grace S`."""
    return f"{option.name} {option.metavar}".rstrip()


def default(option: Option) -> str:
    """What holds without it, as it would be given; "" if that is nothing in particular."""
    value = _DEFAULTS.get(option.key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return f"{value:g}" if isinstance(value, int | float) else value


def _table(options: Iterable[Option]) -> str:
    width = max(len(usage(option)) for option in OPTIONS)
    return "".join(f"  {usage(option):{width}}  {_help(option)}\n" for option in options)


def _help(option: Option) -> str:
    return f"{option.help} ({default(option)})" if default(option) else option.help


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
