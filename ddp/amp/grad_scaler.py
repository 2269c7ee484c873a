"""`GradScaler`: the loss is multiplied so that no float16 gradient vanishes, and these are divided before the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ddp._device import CPU, capturing, device, on, to_device
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, CaptureError, GraphError
from ddp.ops.gradients import unscale, update_scale

Array = Any
_MOST_OPTIMIZERS = 16  # optimizers between two updates


class ScalableOptimizer(Protocol):
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

    On a GPU the scale is in device memory from the first loss on, and the host never waits: the optimizers of
    `ddp.optim`, and ZeroOptimizer over them, leave a step out on the GPU itself. The host waits in `get_scale` and
    `state_dict`, and in `step` of an optimizer of your own, or of one with parameters on several devices.

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
        if str(device).partition(":")[0] not in ("cuda", "cpu"):
            raise ArgumentError(f"GradScaler: the device is 'cuda' or 'cpu', not {device!r}")
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ArgumentError(
                f"GradScaler: growth {growth_factor} is above 1, backoff {backoff_factor} within (0, 1)"
            )
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._enabled = enabled
        self._state = _ScaleState(CPU, float(init_scale), 0)  # moves to the GPU of the first loss that is on a GPU
        # By optimizer: (1,) float32 of the state, not zero where its gradients are not all finite.
        self._found_infs: dict[int, Array] = {}
        self._stepped: set[int] = set()

    def scale(self, outputs: Any) -> Any:
        """A tensor, or the tensors of a list or tuple, multiplied by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)([self.scale(output) for output in outputs])
        # By a tensor of float32: as a float16, the first scale would be infinite.
        return outputs * self._on(outputs.device).scale.to(outputs.device)

    def unscale_(self, optimizer: ScalableOptimizer) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, once between updates.

        Raises: GraphError the second time.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._found_infs:
            raise GraphError("unscale_: these gradients are unscaled already; update() comes first")
        gradients = _gradients(optimizer)
        state = self._on(next(iter(gradients), self._state.device))
        found_inf = state.take()
        # An optimizer that holds gradients in parts, like ZeroOptimizer.
        if hasattr(optimizer, "unscale_gradients"):
            with on(state.device):
                optimizer.unscale_gradients(state.scale.array.reshape(1), found_inf)
        else:
            for device, arrays in gradients.items():
                with on(device):
                    scale = to_device(state.scale.array.reshape(1), device)
                    here = found_inf if device is state.device else device.xp.zeros(1, np.float32)
                    unscale(device.xp, arrays, scale, here)
                if here is not found_inf:
                    found_inf += to_device(here, state.device)
        self._found_infs[id(optimizer)] = found_inf

    def step(self, optimizer: ScalableOptimizer, *args: Any, closure: Callable[[], Any] | None = None) -> Any:
        """optimizer.step(), unless a gradient is infinite or nan; unscales first where that has not been done.

        Raises: ArgumentError for a closure, which would need scaling of its own; GraphError the second time.
        """
        if closure is not None or args:
            raise ArgumentError("GradScaler.step: closures cannot be scaled; compute the loss before")
        if not self._enabled:
            return optimizer.step()
        if id(optimizer) in self._stepped:
            raise GraphError("step: called already since the last update()")
        if id(optimizer) not in self._found_infs:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        found_inf = self._found_infs[id(optimizer)]
        device = self._state.device
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        on_gpu = device.type == "cuda" and devices == {device}
        if not (on_gpu and getattr(optimizer, "_step_supports_amp_scaling", False)):
            return None if found_inf[0] else optimizer.step()  # on a GPU the host waits for this value
        own: Any = optimizer
        own.found_inf = found_inf
        try:
            return optimizer.step()
        finally:
            own.found_inf = None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last update found, or sets it.

        new_scale: a number, or a tensor of one
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._state.set(new_scale)
        elif not self._found_infs:
            raise GraphError("update: no step() or unscale_() since the last one")
        else:
            self._state.adapt(*self._rule())
            if capturing.now is not None:
                capturing.now.guard_value(self._rule)
        self._found_infs.clear()
        self._stepped.clear()

    def get_scale(self) -> float:
        """The factor now; 1 if not enabled. Waits for a GPU that it is on."""
        if not self._enabled:
            return 1.0
        return self._state.read()[0]

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by after enough good steps."""
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after a step that was left out."""
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        """How many good steps in a row are enough."""
        return self._growth_interval

    def is_enabled(self) -> bool:
        """Whether anything is scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale, its settings and the count of good steps; empty if not enabled. Waits for a GPU that it is on."""
        if not self._enabled:
            return {}
        scale, good_steps = self._state.read()
        return {
            "scale": scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what state_dict() gave. Raises: ArgumentError for an empty one."""
        if not self._enabled:
            return
        if not state_dict:
            raise ArgumentError("load_state_dict: the state is empty: its GradScaler was not enabled")
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._state.set(float(state_dict["scale"]), state_dict["_growth_tracker"])

    def _rule(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _on(self, device: device) -> _ScaleState:
        """The state, which moves to the first GPU of a loss."""
        if device.type == "cuda" and self._state.device.type == "cpu" and not self._found_infs:
            if capturing.now is not None:
                raise CaptureError(
                    "GradScaler: a scale begun within a capture would begin anew with every replay: scale a loss before"
                )
            self._state = _ScaleState(device, *self._state.read())
        return self._state


def _gradients(optimizer: ScalableOptimizer) -> dict[device, list[Any]]:
    """The existing gradients of each device, as arrays that are about to change."""
    by_device = defaultdict(list)
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        if p.accumulate_grad is not None and p.accumulate_grad.grad_buffer.full:
            if p.grad_view is not None:
                p.grad_view.version.count += 1
            by_device[p.device].append(p.accumulate_grad.grad_buffer.array)
    return by_device


class _ScaleState:
    """The scale, the count of good steps, and what was found in the gradients of each optimizer; all on `device`.

    scale: a 0-d float32 tensor
    """

    def __init__(self, device: device, scale: float, good_steps: int) -> None:
        self.device = device
        xp = device.xp
        with on(device):
            self.scale: Tensor = wrap(xp.full((), scale, np.float32), device)
            self._good = xp.full(1, good_steps, np.int32)
            self._found_infs_infs = xp.zeros(_MOST_OPTIMIZERS, np.float32)
        self._used = 0

    @property
    def _scale(self) -> Array:  # not an attribute: a copy of the scaler would have two memories for one scale
        return self.scale.array.reshape(1)

    def take(self) -> Array:
        """A flag for one optimizer, (1,) float32, 0: it is set if the optimizer's gradients are not all finite.

        Raises: ArgumentError for more optimizers than fit.
        """
        if self._used == _MOST_OPTIMIZERS:
            raise ArgumentError(f"GradScaler: at most {_MOST_OPTIMIZERS} optimizers between two updates")
        self._used += 1
        return self._found_infs_infs[self._used - 1 : self._used]

    def adapt(self, growth: float, backoff: float, interval: int) -> None:
        """Adapts the scale to what was found since the last time."""
        with on(self.device):
            update_scale(self.device.xp, self._scale, self._good, self._found_infs_infs, growth, backoff, interval)
        self._used = 0
        self.scale.version.count += 1

    def set(self, scale: Any, good_steps: int | None = None) -> None:
        """Begins with another scale, a number or a tensor, and another count of good steps; forgets what was found."""
        with on(self.device):
            self._scale[...] = scale.array.reshape(1) if isinstance(scale, Tensor) else scale
            self._found_infs_infs[...] = 0
            if good_steps is not None:
                self._good[...] = good_steps
        self._used = 0
        self.scale.version.count += 1

    def read(self) -> tuple[float, int]:
        """The scale, and how many steps were good since it last changed. Waits for the GPU."""
        return float(to_device(self._scale, CPU)[0]), int(to_device(self._good, CPU)[0])
