"""A scale on a GPU, beside what depends on it: losses are scaled, steps left out, the scale adapted, without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._device import capturing, device, on
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, CaptureError
from ddp.ops.cuda import clipping

Array = Any
_SLOTS = 16  # optimizers between two updates


class ScaleThere:
    """The scale, the count of good steps, and what was found in the gradients of each optimizer; all on `where`.

    scale: a 0-d float32 tensor
    """

    def __init__(self, where: device, scale: float, good_steps: int) -> None:
        if capturing.now is not None:
            raise CaptureError(
                "GradScaler: a scale begun within a capture would begin anew with every replay: scale a loss before"
            )
        self.where, xp = where, where.xp
        with on(where):
            self._scale = xp.full(1, scale, np.float32)
            self._good = xp.full(1, good_steps, np.int32)
            self._founds = xp.zeros(_SLOTS, np.float32)
        self.scale: Tensor = wrap(self._scale.reshape(()), where)
        self._used = 0

    def take(self) -> Array:
        """(1,) float32, zero: where it is noted that an optimizer's gradients are not finite.

        Raises: ArgumentError for more optimizers than there is room for.
        """
        if self._used == _SLOTS:
            raise ArgumentError(f"GradScaler: at most {_SLOTS} optimizers between two updates")
        self._used += 1
        return self._founds[self._used - 1 : self._used]

    def unscale(self, gradients: list[Array], found: Array) -> None:
        """Divides the gradients, which are all on `where`, by the scale."""
        with on(self.where):
            clipping.unscale(self.where.xp, gradients, self._scale, found)

    def unscale_parts(self, optimizer: Any, found: Array) -> None:
        """The same, for an optimizer that holds gradients in parts."""
        with on(self.where):
            optimizer.unscale_there(self._scale, found)

    def adapt(self, found: bool, growth: float, backoff: float, interval: int) -> None:
        """Adapts the scale to what was found since the last time. found: something was, by somebody who waited"""
        with on(self.where):
            if found:
                self._founds[:1] = 1
            clipping.adapt(self.where.xp, self._scale, self._good, self._founds, growth, backoff, interval)
        self._used = 0
        self.scale.version.count += 1

    def set(self, scale: Any) -> None:
        """Begins with another scale, a number or a tensor; what was found is forgotten."""
        with on(self.where):
            self._scale[...] = scale.array.reshape(1) if isinstance(scale, Tensor) else scale
            self._founds[...] = 0
        self._used = 0
        self.scale.version.count += 1

    def set_good_steps(self, count: int) -> None:
        """How many steps were good since the scale last changed."""
        with on(self.where):
            self._good[...] = count

    def read(self) -> tuple[float, int]:
        """The scale, and how many steps were good since it last changed. Waits for the GPU."""
        return float(self._scale.get()[0]), int(self._good.get()[0])
