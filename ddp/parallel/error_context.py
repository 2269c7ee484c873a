"""Puts the context of a collective before its error: the step, the bucket, its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from collectives.errors import CollectivesError


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Puts `what` before the message of a CollectivesError raised inside; its type stays."""
    try:
        yield
    except CollectivesError as error:
        # A fresh exception: the one instance may be raised at several places.
        raise type(error)(f"{what}: {error}") from error.__cause__
