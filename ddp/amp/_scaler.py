"""`GradScaler`: the loss is multiplied so that no float16 gradient vanishes, and these are divided before the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ddp._tensor.interop import scalar_tensor
from ddp.errors import ArgumentError, GraphError


class Optimizer(Protocol):
    """What a scaler asks of an optimizer."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Updates the parameters."""


class GradScaler:
    """Scales losses by a factor that grows while gradients stay finite, and shrinks when they do not.

    init_scale: the first factor; growth_factor, backoff_factor: by what it is multiplied after `growth_interval` steps
    without, and after each step with, a gradient that is infinite or nan: such a step is left out. enabled: False makes
    everything pass through.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)   # only where gradients are looked at, or clipped
        scaler.step(optimizer)
        scaler.update()

    Under DataParallel every rank has the same gradients, so all leave out the same steps.

    Raises: ArgumentError for factors on the wrong side of 1. Source: Micikevicius et al. 2018, arXiv:1710.03740.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ArgumentError(
                f"GradScaler: growth {growth_factor} is above 1, backoff {backoff_factor} within (0, 1)"
            )
        self._scale = float(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._enabled = enabled
        self._found: dict[int, bool] = {}  # by optimizer: its gradients, unscaled, are not all finite
        self._stepped: set[int] = set()

    def scale(self, outputs: Any) -> Any:
        """A tensor, or the tensors of a list or tuple, multiplied by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)([self.scale(each) for each in outputs])
        # By a tensor of float32: as a float16, the first scale would be infinite.
        return outputs * scalar_tensor(self._scale, dtype="float32", device=outputs.device)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, once between updates.

        Raises: GraphError the second time.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._found:
            raise GraphError("unscale_: these gradients are unscaled already; update() comes first")
        own = getattr(optimizer, "unscale_gradients", None)  # of one that holds gradients in parts
        factor = 1 / self._scale
        self._found[id(optimizer)] = _unscale(optimizer, factor) if own is None else own(factor)

    def step(self, optimizer: Optimizer, *args: Any, closure: Callable[[], Any] | None = None) -> Any:
        """optimizer.step(), unless a gradient is infinite or nan; unscales first where that has not been done.

        Raises: ArgumentError for a closure, which would need scaling of its own; GraphError the second time.
        """
        if closure is not None or args:
            raise ArgumentError("GradScaler.step: closures cannot be scaled; compute the loss before")
        if not self._enabled:
            return optimizer.step()
        if id(optimizer) in self._stepped:
            raise GraphError("step: called already since the last update()")
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        return None if self._found[id(optimizer)] else optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        """Adapts the scale to what the steps since the last update found, or sets it to `new_scale`."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._found:
            raise GraphError("update: no step() or unscale_() since the last one")
        elif any(self._found.values()):
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._good_steps = 0
        self._found.clear()
        self._stepped.clear()

    def get_scale(self) -> float:
        """The factor now; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether anything is scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale, its settings and the count of good steps; empty if not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what state_dict() gave. Raises: ArgumentError for an empty one."""
        if not self._enabled:
            return
        if not state_dict:
            raise ArgumentError("load_state_dict: the state is empty: its GradScaler was not enabled")
        self._scale = float(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._good_steps = state_dict["_growth_tracker"]


def _unscale(optimizer: Optimizer, factor: float) -> bool:
    """Multiplies the gradients by `factor`; whether one of them is infinite or nan."""
    found = False
    for group in optimizer.param_groups:
        for p in group["params"]:
            end = p._end
            if end is None or not end.slot.full or not p._array.size:
                continue
            g, xp = end.slot.buffer, p._device.xp
            # The extremes are nan or infinite if anything is, and take no second array.
            found = found or not bool(xp.isfinite(g.max()) and xp.isfinite(g.min()))
            g *= factor
    return found
