"""Elements put to zero at random."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved


# z = x where kept, scaled to the same expectation, else 0;  dx = g treated alike
def _dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    """shape: of what is drawn, which broadcasts over x: whole channels fall where their sizes are 1."""
    keep = generator.random(shape, dtype=xp.float32) >= p
    scale = 1 / (1 - p) if p < 1 else 0.0
    return x * keep * scale, (keep, scale)


def _dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    keep, scale = residual
    return (g * keep * scale,)


dropout = Op("dropout", _dropout, _dropout_backward, inputs=("x",))
