"""`ddp-launch`: from the words of a command line to a job, and from a job's end to an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from launcher.job import Job, UsageError
from launcher.settings.layers import Layer
from launcher.settings.options import BY_NAME, ELSEWHERE, Option, nearest

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


def said(words: Words) -> Layer:
    """What a command line says of the job, and the job file and `--set` in it.

    Raises: UsageError, in one sentence.
    """
    layer = Layer({}, {})
    files, changes = words.all("--config"), words.all("--set")
    if files or changes:
        from launcher.settings import config  # here, because reading TOML takes milliseconds

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
    return said(take_apart(argv)).job()


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
        layer = said(words)
        job = layer.job()
        from launcher.engines import settled  # here, because who made a mistake need not wait for it

        job = settled(job, os.environ)
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
            return 128 + signal.SIGPIPE  # nobody reads on, as with `| head`
        _complain(f"the output cannot be written: {error.strerror}")
        return 1


def _complain(text: str) -> None:
    """Says what went wrong, if anybody can be told: the exit code says it too."""
    if sys.stderr is None:
        return  # closed; print would take stdout instead
    try:
        print(f"ddp-launch: {text}", file=sys.stderr)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python would try once more, and end with a code of its own


def _information(words: Words) -> str | None:
    """What is asked for instead of a job, None if nothing is."""
    if words.all("--help") or words.all("--help-all"):
        from launcher.settings import manual

        return manual.full() if words.all("--help-all") else manual.short()
    if words.all("--version"):
        from collectives.version import __version__

        return f"ddp-launch {__version__}\n"
    return None


def _preview(words: Words, layer: Layer, job: Job) -> str | None:
    """What is asked for instead of running the job, None if nothing is. layer: what the job was made of"""
    if words.all("--print-config"):
        from launcher.settings import config

        return config.show(job, layer)
    if words.all("--dry-run"):
        from launcher.settings import dry_run

        return dry_run.show(job, os.environ)
    return None


def _run(job: Job) -> int:
    from launcher.leftovers import remove_leftovers
    from launcher.process import become_subreaper, childless, children_of, parents, sweep
    from launcher.running.watch import launch

    began = time.time()
    # A parent that ignores it hands that down, and no child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # If the guard is killed, what it guarded comes to us; what this process had before it became us is not ours.
    before = frozenset() if childless() else frozenset(children_of(parents(), os.getpid()))
    become_subreaper()
    try:
        return launch(job)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job is over, and so is this process, in a moment
        sweep(_SWEEP_LIMIT, spare=before)
        remove_leftovers(began)
