"""A number of the GPU's without a stall: it travels while the host goes on, and is read when it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp._device import CPU
from ddp._tensor.base import TensorBase, wrap
from ddp.cuda.streams import Event
from ddp.errors import DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Fetched:
    """A tensor on its way to the CPU; made by `fetch`."""

    def __init__(self, tensor: Tensor, event: Event | None) -> None:
        self._tensor, self._event = tensor, event

    def ready(self) -> bool:
        """Whether it is there, so that `value` does not wait. Raises: CudaError."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def tensor(self) -> Tensor:
        """The tensor on the CPU. Waits until it is there, for nothing that was launched after. Raises: CudaError."""
        if self._event is not None and not self.ready():
            self._event.synchronize()
            self._event = None
        return self._tensor

    def value(self) -> Any:
        """Its elements as Python numbers, as `tolist` has them: a number for a loss. Waits until they are there."""
        return self.tensor().tolist()

    def __repr__(self) -> str:
        return f"<ddp.cuda.Fetched {'there' if self.ready() else 'under way'}>"


def fetch(tensor: Tensor) -> Fetched:
    """Sends the value that `tensor` has now to the CPU, and waits for nothing: for the log of a training loop.

        log = ddp.cuda.fetch(loss)
        ...                         # steps later, when the device has got there
        print(log.value())

    It goes through pinned memory, in the order of the current stream; what is written to the tensor afterwards does not
    matter. A tensor of the CPU is copied and there at once, so that one loop does for both. Gradients do not follow.
    """
    if not isinstance(tensor, TensorBase):
        raise DtypeError(f"fetch: expected a tensor, got {type(tensor).__name__}")
    if tensor.device is CPU:
        return Fetched(wrap(tensor.array.copy(), CPU), None)
    from ddp._cuda import copies, stream_order

    lane = stream_order.current(tensor.device.xp, tensor.array.device.id)
    made = wrap(copies.down(tensor.array, non_blocking=True), CPU)
    event = Event()
    event._event, event._lane = lane.record(), lane
    return Fetched(made, event)
