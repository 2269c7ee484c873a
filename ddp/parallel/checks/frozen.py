"""A parameter that was frozen when its model was wrapped has no bucket: training it would let the ranks drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._engine import Leaf
from ddp.errors import ParallelError


class Frozen:
    """The watcher of such a leaf: see `ddp._engine.GradReadyHook`."""

    turn = -1  # before anybody has told other ranks anything

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner  # the DataParallel
        self._name = name

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """Raises: ParallelError, since the leaf requires grad now."""
        raise ParallelError(
            f"{self._name} did not require grad when the model was wrapped, so no rank would reduce its gradient: call "
            "close() and wrap the model again"
        )

    def ready(self, leaf: Leaf) -> None:
        """Never called: begin raises."""

    def end(self) -> None:
        """Never called: begin raises."""

    def abandon(self, error: BaseException) -> None:
        """Nothing was begun."""
