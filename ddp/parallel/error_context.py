"""Adds the context of a collective to the message of its error: the step, the bucket, the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from collectives.errors import CollectivesError


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Puts `what` before the message of a CollectivesError that the block raises. The type of the error stays."""
    try:
        yield
    except CollectivesError as error:
        # A new exception, because the same instance may be raised at several places.
        raise type(error)(f"{what}: {error}") from error.__cause__
