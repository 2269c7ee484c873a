"""How a contract's tests reach their ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives import Communicator

#: Calls a function with its communicator on every rank, and returns the results of the ranks in this process.
Run = Callable[[Callable[[Communicator], Any]], list[Any]]


def on_every_rank(check: Callable[..., None]) -> Callable[..., None]:
    """Makes a method that takes a communicator a test that takes `run`: every rank calls it with its own."""

    @functools.wraps(check)
    def test(self: object, run: Run, **given: Any) -> None:
        run(lambda comm: check(self, comm, **given))

    itself, comm, *others = inspect.signature(check).parameters.values()
    test.__signature__ = inspect.Signature([itself, comm.replace(name="run"), *others])  # type: ignore[attr-defined]
    return test


def assert_usable(comm: Communicator) -> None:
    """Fails if the ranks are no longer at the same call."""
    assert comm.all_reduce(np.ones(1)) == comm.size
