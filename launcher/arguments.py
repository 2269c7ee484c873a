"""argparse for ddp-launch, ddp-bench and ddp-doctor: a wrong command line raises a `UsageError` of one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from launcher.errors import UsageError


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises instead of exiting, takes no abbreviations, and suggests options."""

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
        """Raises: UsageError, always. A leading `argument` is removed, so texts are like `-n/--ranks should be ...`."""
        if message.startswith("argument "):
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        raise UsageError(message)

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The options and positional arguments of a command line, by name; their order is free. Raises: UsageError"""
        options, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            raise self.unknown(unknown)
        return vars(options)

    @property
    def actions(self) -> list[argparse.Action]:
        """All options and positional arguments, in the order in which they were added."""
        return self._actions

    def action(self, option: str) -> argparse.Action | None:
        """The option called `option` (`--grace`), None if it does not exist."""
        return self._option_string_actions.get(option)

    def unknown(self, words: Sequence[str]) -> UsageError:
        """The error for words that this command does not understand; the first is taken for an unknown option."""
        option, _, _ = words[0].partition("=")
        return UsageError(f"unknown option {words[0]}{nearest(option, self._option_string_actions)}")


def value(what: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns an argument's `type` for argparse. It calls `parse`. For a ValueError, the message names `what`."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be {what}, not {text!r}") from None

    return convert


def positive(text: str) -> int:
    """A whole number above zero. Raises: ValueError for anything else."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def names(what: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """An argument's `type` for argparse: names from `known`, separated by commas; `all` means all of them."""

    def convert(text: str) -> tuple[str, ...]:
        chosen = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"names an unknown {what}: {name}{nearest(name, known)}")
        return chosen

    return convert


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` with the known name that is most similar; "" if none is similar."""
    from difflib import get_close_matches

    names = {option.lstrip("-"): option for option in known}  # Without dashes: all options share them.
    matches = get_close_matches(name.lstrip("-"), names, n=1)
    return f" (did you mean {names[matches[0]]}?)" if matches else ""
