"""`GradScaler`: multiplies the loss so that float16 gradients do not vanish; before the step, divides the gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ddp._device import CPU, capturing, device, on, to_device
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, CaptureError, GraphError, StateDictError
from ddp.ops.gradients import unscale, update_scale

Array = Any
_MOST_OPTIMIZERS = 16  # maximum number of optimizers between two updates


class ScalableOptimizer(Protocol):
    """The attributes that an optimizer must have for a GradScaler."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Updates the parameters."""


class GradScaler:
    """Scales losses by a factor that grows while gradients stay finite, and shrinks when they do not.

    A step with a gradient that is infinite or nan is skipped. Other steps are called good. The steps of several
    optimizers between two calls of `update` count as one step.

    init_scale: the first factor
    growth_factor: the factor is multiplied by this after `growth_interval` good steps in a row
    backoff_factor: the factor is multiplied by this after a skipped step
    enabled: False: nothing is scaled, and no step is skipped

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)   # only if gradients are clipped or read before the step
        scaler.step(optimizer)
        scaler.update()

    Under DataParallel every rank has the same gradients, so all ranks skip the same steps.

    On a GPU, the scale is in device memory from the first loss on. The optimizers of `ddp.optim` skip a step on the GPU
    itself, without waiting; so does a ZeroOptimizer over one of them with NCCL. The host waits in `get_scale` and
    `state_dict`. It also waits in `step` for an optimizer of your own, or one with parameters on several devices.

    Raises: ArgumentError if growth_factor <= 1, backoff_factor is not in (0, 1), or the device is not CUDA or CPU.
    Source: Micikevicius et al. 2018, arXiv:1710.03740.
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
        # By id of an optimizer: its flag, (1,) float32, which is not 0 if its gradients are not all finite.
        self._found_infs: dict[int, Array] = {}
        self._stepped: set[int] = set()

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or the tensors of a list or tuple, by the scale. Returns the products.

        If not enabled, returns `outputs` itself.

        Raises: CaptureError in the capture of a CUDA graph, if no loss on a GPU was scaled before.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)([self.scale(output) for output in outputs])
        # The scale is a float32 tensor: in float16, the default scale would be infinite.
        return outputs * self._on(outputs.device).scale.to(outputs.device)

    def unscale_(self, optimizer: ScalableOptimizer) -> None:
        """Divides the gradients of the optimizer's parameters by the scale.

        Raises: GraphError if called twice for this optimizer before `update`; ArgumentError for more than 16
        optimizers; CaptureError as `scale`.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._found_infs:
            raise GraphError("unscale_: these gradients are unscaled already; update() comes first")
        gradients = _gradients(optimizer)
        state = self._on(next(iter(gradients), self._state.device))
        found_inf = state.take()
        # A ZeroOptimizer holds only parts of the gradients, so it divides them itself.
        if hasattr(optimizer, "unscale_gradients"):
            with on(state.device):
                optimizer.unscale_gradients(state.scale.array.reshape(1), found_inf)
        else:
            for device, arrays in gradients.items():
                with on(device):
                    scale = to_device(state.scale.array.reshape(1), device)
                    device_found_inf = found_inf if device is state.device else device.xp.zeros(1, np.float32)
                    unscale(device.xp, arrays, scale, device_found_inf)
                if device_found_inf is not found_inf:
                    found_inf += to_device(device_found_inf, state.device)
        self._found_infs[id(optimizer)] = found_inf

    def step(self, optimizer: ScalableOptimizer, *args: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the optimizer, unless a gradient is infinite or nan. Calls `unscale_` first if you have not.

        Returns: what the optimizer's `step` returns; None if the step is skipped

        Raises: ArgumentError for a closure or other arguments, because the loss of a closure would not be scaled;
        GraphError if called twice for this optimizer before `update`; what `unscale_` raises.
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
        """Lowers the scale if gradients since the last update were not all finite; raises it after enough good steps.

        new_scale: sets the scale to this number, or to this tensor of one element, instead
        Raises: GraphError without new_scale, if neither `step` nor `unscale_` was called since the last update.
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
        """The present scale; 1 if not enabled. If the scale is on a GPU, waits for the GPU."""
        if not self._enabled:
            return 1.0
        return self._state.read()[0]

    def get_growth_factor(self) -> float:
        """The factor by which the scale is multiplied after enough good steps."""
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        """The factor by which the scale is multiplied after a skipped step."""
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        """The number of good steps in a row after which the scale grows."""
        return self._growth_interval

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale, its settings and the count of good steps; {} if not enabled. Waits for a GPU like `get_scale`."""
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
        """Restores the state that `state_dict` returned. Does nothing if not enabled.

        Raises: ArgumentError if the state is empty; StateDictError if it is not a state of a GradScaler. Then
        nothing has changed.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ArgumentError("load_state_dict: the state is empty: its GradScaler was not enabled")
        try:
            scale = float(state_dict["scale"])
            good_steps = int(state_dict["_growth_tracker"])
            rule = [state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise StateDictError(
                f"load_state_dict: expected what GradScaler.state_dict() gave, got {state_dict!r:.200}"
            ) from None
        self._growth_factor, self._backoff_factor, self._growth_interval = rule
        self._state.set(scale, good_steps)

    def _rule(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _on(self, device: device) -> _ScaleState:
        """Returns the state. If it is on the CPU and `device` is a GPU, moves it there first, unless a flag is in use.

        Raises: CaptureError if it would have to be moved in the capture of a CUDA graph.
        """
        if device.type == "cuda" and self._state.device.type == "cpu" and not self._found_infs:
            if capturing.now is not None:
                raise CaptureError(
                    "GradScaler: a scale begun within a capture would begin anew with every replay: scale a loss before"
                )
            self._state = _ScaleState(device, *self._state.read())
        return self._state


def _gradients(optimizer: ScalableOptimizer) -> dict[device, list[Any]]:
    """The arrays of the gradients that exist, by device. Increments their versions, because the caller changes them."""
    by_device = defaultdict(list)
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        if p.accumulate_grad is not None and p.accumulate_grad.grad_buffer.full:
            if p.grad_view is not None:
                p.grad_view.version.count += 1
            by_device[p.device].append(p.accumulate_grad.grad_buffer.array)
    return by_device


class _ScaleState:
    """The scale, the count of good steps, and a flag for each optimizer; all on `device`.

    scale: a 0-d float32 tensor. A flag is not 0 if the gradients of its optimizer are not all finite.
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
    def _scale(self) -> Array:  # not an attribute: in a deep copy, it would not share the memory of `scale`
        return self.scale.array.reshape(1)

    def take(self) -> Array:
        """Returns a flag for another optimizer, (1,) float32, which is 0. The caller sets it.

        Raises: ArgumentError if all flags are taken.
        """
        if self._used == _MOST_OPTIMIZERS:
            raise ArgumentError(f"GradScaler: at most {_MOST_OPTIMIZERS} optimizers between two updates")
        self._used += 1
        return self._found_infs_infs[self._used - 1 : self._used]

    def adapt(self, growth: float, backoff: float, interval: int) -> None:
        """Lowers the scale if a flag is not 0, otherwise counts a good step and may raise it. Sets the flags to 0."""
        with on(self.device):
            update_scale(self.device.xp, self._scale, self._good, self._found_infs_infs, growth, backoff, interval)
        self._used = 0
        self.scale.version.count += 1

    def set(self, scale: Any, good_steps: int | None = None) -> None:
        """Sets the scale, to a number or a tensor, and the count of good steps if given; sets the flags to 0."""
        with on(self.device):
            self._scale[...] = scale.array.reshape(1) if isinstance(scale, Tensor) else scale
            self._found_infs_infs[...] = 0
            if good_steps is not None:
                self._good[...] = good_steps
        self._used = 0
        self.scale.version.count += 1

    def read(self) -> tuple[float, int]:
        """The scale, and the number of good steps that count towards its next growth. Waits for the GPU."""
        return float(to_device(self._scale, CPU)[0]), int(to_device(self._good, CPU)[0])
