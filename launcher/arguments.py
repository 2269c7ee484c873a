"""argparse for the three commands: what is wrong on a command line is a `UsageError` of one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from launcher.errors import UsageError


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises instead of exiting, takes no abbreviations, and suggests a known option."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(
            prog,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=100),
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        """Raises: UsageError. `argument -n/--ranks: should be ...` becomes `-n/--ranks should be ...`."""
        if message.startswith("argument "):
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        raise UsageError(message)

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The options on the command line, by name, and the positional arguments, wherever they stand.

        Raises: UsageError, in one sentence.
        """
        known, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            raise self.unknown(unknown)
        return vars(known)

    @property
    def actions(self) -> list[argparse.Action]:
        """All options, in the order in which they were added."""
        return self._actions

    def action(self, option: str) -> argparse.Action | None:
        """The option of that name (`--grace`), None if there is none."""
        return self._option_string_actions.get(option)

    def unknown(self, words: Sequence[str]) -> UsageError:
        """The error for words of which the first is no option of this command."""
        return UsageError(
            f"unknown option {words[0]}{nearest(words[0].partition('=')[0], self._option_string_actions)}"
        )


def value(what: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse's `type`: `read`, with an error that says what the value should be."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be {what}, not {text!r}") from None

    return convert


def positive(text: str) -> int:
    """A whole number above zero. Raises: ValueError for anything else."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def names(what: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse's `type`: names from `known`, separated by commas; `all` is all of them."""

    def convert(text: str) -> tuple[str, ...]:
        found = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"names an unknown {what}: {name}{nearest(name, known)}")
        return found

    return convert


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing if `name` is like none of the known ones."""
    from difflib import get_close_matches

    names = {each.lstrip("-"): each for each in known}  # dashes alone make no option like another
    close = get_close_matches(name.lstrip("-"), names, n=1)
    return f" (did you mean {names[close[0]]}?)" if close else ""
