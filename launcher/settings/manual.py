"""What `--help` and `--help-all` print: the table of options, in words. The first fits one screen of 24 by 100."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from launcher.job import Job
from launcher.settings.options import GROUPS, OPTIONS, Option

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
