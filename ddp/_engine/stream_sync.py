"""Runs backward on the CUDA streams that forward ran on.

Before a stream reads a gradient that another stream computed, it waits for that stream. As in PyTorch, the backward of
a node runs on `s` if its op ran under `ddp.cuda.stream(s)`. At the end, the stream that `backward` was called on waits
for all other streams. Gradients of leaves are added up on that stream; for leaves on another GPU, on the current stream
of that GPU. So code after `backward` needs no other synchronization than code after an op.

A backward uses a `StreamSync` only after `ddp.cuda.stream` or `set_stream` chose a stream, after a second GPU was used,
or with CUDA_LAUNCH_BLOCKING=1: see `enable` and `on_other_gpu`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddp import _device
from ddp._engine.anomaly import forward_line
from ddp._engine.grad_buffer import Leaf
from ddp._engine.graph import Edge, Node, SelectOutput
from ddp._engine.modes import state


class Switch:
    """Settings of all backwards of this process.

    on: every backward uses a `StreamSync`; blocking: after every node, the host waits for the node's work
    several_gpus: a backward also uses a `StreamSync` if it begins on another GPU than the current one
    """

    on = False
    blocking = False
    several_gpus = False


switch = Switch()


def enable(blocking: bool = False) -> None:
    """Makes every later backward use a `StreamSync`. blocking: also makes the host wait after every node."""
    switch.on = True
    switch.blocking = switch.blocking or blocking


def on_other_gpu(grads: Iterable[Any]) -> bool:
    """Whether some gradient that a backward begins with is on another GPU than the current one."""
    indices = {_device_of(g) for g in grads} - {None}
    return bool(indices) and indices != {_device.device("cuda").xp.cuda.runtime.getDevice()}


def note_stream(node: Node) -> None:
    """Called for each new node (see `Mode.observers`): stores the current stream in it if its op runs on a GPU."""
    # A transfer to the CPU is launched on the GPU that the tensor comes from (`residual`), and so is its backward.
    xp = node.residual.xp if node.op.name == "transfer" and node.xp.__name__ == "numpy" else node.xp
    if xp.__name__ != "numpy":
        node.ensure_metadata().stream = _device.runtime().stream_order.current(xp)


class StreamSync:
    """Context manager around one backward: runs each node on its stream, and orders gradients that cross streams.

    edges: all edges that this backward will reach. `enter` and `leave` are called before and after a node runs,
    `begin_delivery` and `end_delivery` before and after one gradient is delivered.
    """

    def __init__(self, edges: Iterable[Edge]) -> None:
        xp = self._xp = _device.device("cuda").xp
        self._streams = _device.runtime().stream_order
        self._home: Any = self._streams.current(xp)
        # The stream of nodes that have recorded no stream, because they were made before a stream was chosen.
        self._usual = self._streams.default(xp) if note_stream in state.observers else self._home
        self._current = self._home
        self._source = self._home  # the stream that computed the gradients being delivered
        self._computed: Any = None  # the event recorded after these gradients
        self._before = {self._home.device: self._home}  # the stream that was current on each device
        self._used: dict[Any, None] = {}  # the streams that were used, except `_home`
        self._crossed: dict[Edge, list[Any]] = {}  # arrays from another stream, by the edge that reads them
        self._node: Node | None = None
        self._several = any(type(edge) is not Leaf and self._stream_of(edge) != self._home for edge in edges)

    def __enter__(self) -> StreamSync:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            for stream in self._used:
                self._home.wait_for(stream)
            for arrays in self._crossed.values():  # gradients of sinks, and those that an error left behind
                for array in arrays:
                    self._streams.record(getattr(array, "gradient", array), self._home)
        finally:
            for stream in self._before.values():
                stream.use()
            self._home.use()
        if isinstance(error, Exception) and switch.blocking and self._node is not None:
            self._name_failed_op(error, self._node)

    def enter(self, node: Node, g: Any) -> None:
        """Called before `node` runs on `g`: makes its stream the current one."""
        self._node = node
        self._source = self._stream_of(node, g)
        self._computed = None
        self._use(self._source)

    @property
    def on_home_stream(self) -> bool:
        """Whether gradients of leaves are added up on the current stream, so that a node may write to their memory."""
        return self._current == self._home

    def leave(self, node: Node, g: Any) -> None:
        """Called after `node` ran on `g`, before it is freed."""
        # Code of the node may have left another stream current (`stream_order.StreamGuard`).
        if self._streams.current(self._xp) != self._current:
            self._current.use()
        if self._several:
            # Freed memory goes back to the stream that allocated it, which may not be the stream that reads it here.
            self._streams.keep_alive(self._source, self._crossed.pop(node, None), g, node.saved, node.residual)
        if switch.blocking and not self._source.capturing:
            try:
                self._source.cupy_stream.synchronize()
            except Exception as error:
                self._name_failed_op(error, node)
                raise

    def begin_delivery(self, edge: Edge, result: Any) -> None:
        """Called before `result` is added to the gradient of `edge`.

        Makes the stream of `edge` wait for `result`, and makes that stream current.
        """
        stream = self._stream_of(edge, result)
        if result is not None and stream != self._source:
            if self._computed is None:
                self._computed = self._source.record()
            stream.wait(self._computed)
            self._crossed.setdefault(edge, []).append(result)
        self._use(stream)

    def end_delivery(self, edge: Edge, collects: bool) -> None:
        """Called after a result was added to the gradient of `edge`.

        collects: whether `edge` has not read the gradient yet
        """
        if type(edge) is Leaf and not collects and (arrays := self._crossed.pop(edge, None)) is not None:
            self._streams.keep_alive(self._current, *arrays)

    def _stream_of(self, edge: Edge, result: Any = None) -> Any:
        if isinstance(edge, Node):
            if type(edge.op) is SelectOutput and edge.edges:  # it launches no work
                return self._stream_of(edge.edges[0], result)  # type: ignore[arg-type]  # the MultiOutputNode
            if edge.metadata is not None and edge.metadata.stream is not None:
                return edge.metadata.stream
        index = _device_of(result)
        if index is not None and index != self._home.device:  # there are several GPUs
            return self._before.get(index) or self._streams.current(self._xp, index)
        return self._home if isinstance(edge, Leaf) else self._usual

    def _use(self, stream: Any) -> None:
        if stream == self._current:
            return
        if stream.device not in self._before:
            self._before[stream.device] = self._streams.current(self._xp, stream.device)
        if stream != self._home:
            self._used[stream] = None
        stream.use()
        self._current = stream

    @staticmethod
    def _name_failed_op(error: Exception, node: Node) -> None:
        """Raises: CudaError if CUDA reported `error`, naming the op whose backward ran."""
        inputs = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in node.saved if hasattr(x, "shape"))
        errors = _device.runtime().cuda_errors
        op = f"the backward of {node.op.name}"
        named = errors.attribute_to_op(error, op, inputs or "not saved", forward_line(node))
        if named is not error:
            raise named from error


def _device_of(result: Any) -> int | None:
    """The index of the GPU that a gradient is on; None for a gradient on the CPU, or if `result` is None."""
    if isinstance(result, list):  # the gradients of an op with several results
        result = next((gradient for gradient in result if gradient is not None), None)
    array = getattr(result, "gradient", result)
    return getattr(getattr(array, "device", None), "id", None)  # NumPy's `device` is the text "cpu", without `id`
