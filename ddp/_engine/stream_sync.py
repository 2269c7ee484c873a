"""Backward on the streams that forward ran on: a gradient that crosses from one stream to another brings an edge along.

As in PyTorch: a node made while `ddp.cuda.stream(s)` was on runs its backward on `s`; gradients of leaves are added up
on the stream that `backward` was called on, and that one waits, at the end, for all others. So a call of `backward`
may be followed by anything that the call of an op may be followed by.

Nothing here runs before a second stream, or a second GPU, is used, or CUDA_LAUNCH_BLOCKING=1: `enable` is the switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddp import _device
from ddp._engine.anomaly import forward_line
from ddp._engine.leaves import Leaf
from ddp._engine.modes import state
from ddp._engine.nodes import Edge, Node, SelectOutput


class Switch:
    """Whether a backward of this process has to look for streams, and whether every node has to wait for its work."""

    on = False
    blocking = False
    several_gpus = False  # there are several GPUs


switch = Switch()


def enable(blocking: bool = False) -> None:
    """From now on backward looks for streams and devices. blocking: and every node waits for its work."""
    switch.on = True
    switch.blocking = switch.blocking or blocking


def on_other_gpu(grads: Iterable[Any]) -> bool:
    """Whether some gradient that a backward begins with is on another GPU than the current one."""
    indices = {_device_of(g) for g in grads} - {None}
    return bool(indices) and indices != {_device.device("cuda").xp.cuda.runtime.getDevice()}


def note_stream(node: Node) -> None:
    """An observer of new nodes: they remember the current stream."""
    # What brings numbers to the CPU is launched on the GPU, too, and so is its backward.
    xp = node.residual.xp if node.op.name == "transfer" and node.xp.__name__ == "numpy" else node.xp
    if xp.__name__ != "numpy":
        node.ensure_metadata().stream = _device.runtime().stream_order.current(xp)


class StreamSync:
    """Runs each node of one backward on its stream, and orders gradients that cross; a context manager around it.

    edges: all that this backward will reach. enter and leave go around a node's run, begin_delivery and end_delivery
    around the delivery of one gradient.
    """

    def __init__(self, edges: Iterable[Edge]) -> None:
        xp = self._xp = _device.device("cuda").xp
        self._streams = _device.runtime().stream_order
        self._home: Any = self._streams.current(xp)
        # Where nodes run that remember no stream: they were made before a stream was chosen.
        self._usual = self._streams.default(xp) if note_stream in state.observers else self._home
        self._at = self._home  # the current one
        self._source, self._mark = self._home, None  # whose gradients are delivered, and the event that they are there
        self._before = {self._home.device: self._home}  # what was current on each device
        self._used: dict[Any, None] = {}  # the streams that were used, but for that one
        self._crossed: dict[Edge, list[Any]] = {}  # arrays from another stream, by the edge that reads them
        self._node: Node | None = None
        self._several = any(type(edge) is not Leaf and self._stream_of(edge) != self._home for edge in edges)

    def __enter__(self) -> StreamSync:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            for stream in self._used:
                self._home.wait_for(stream)
            for arrays in self._crossed.values():  # what was asked for, and what an error left behind
                for array in arrays:
                    self._streams.record(getattr(array, "gradient", array), self._home)
        finally:
            for stream in self._before.values():
                stream.use()
            self._home.use()
        if isinstance(error, Exception) and switch.blocking and self._node is not None:
            self._name_failed_op(error, self._node)

    def enter(self, node: Node, g: Any) -> None:
        """Before `node` runs on `g`: its stream is the current one."""
        self._node = node
        self._source, self._mark = self._stream_of(node, g), None
        self._use(self._source)

    @property
    def on_home_stream(self) -> bool:
        """Whether the current stream is that of leaves, so that their memory may be written to."""
        return self._at == self._home

    def leave(self, node: Node, g: Any) -> None:
        """After `node` ran on `g`, and before it lets go of what it saved."""
        # Code of the node may have left another stream current (`stream_order.StreamGuard`).
        if self._streams.current(self._xp) != self._at:
            self._at.use()
        if self._several:
            # Memory goes back to the stream that it was made on, which may be another than the one that reads it here.
            self._streams.keep_alive(self._source, self._crossed.pop(node, None), g, node.saved, node.residual)
        if switch.blocking and not self._source.capturing:
            try:
                self._source.cupy_stream.synchronize()
            except Exception as error:
                self._name_failed_op(error, node)
                raise

    def begin_delivery(self, edge: Edge, result: Any) -> None:
        """Before `result` is added to the gradient of `edge`: its stream is the current one, and waits for it."""
        stream = self._stream_of(edge, result)
        if result is not None and stream != self._source:
            if self._mark is None:
                self._mark = self._source.record()
            stream.wait(self._mark)
            self._crossed.setdefault(edge, []).append(result)
        self._use(stream)

    def end_delivery(self, edge: Edge, collects: bool) -> None:
        """After it was added. A leaf has read what arrived, unless it still collects it."""
        if type(edge) is Leaf and not collects and (arrays := self._crossed.pop(edge, None)) is not None:
            self._streams.keep_alive(self._at, *arrays)

    def _stream_of(self, edge: Edge, result: Any = None) -> Any:
        if isinstance(edge, Node):
            if type(edge.op) is SelectOutput and edge.edges:  # a port launches nothing of its own
                return self._stream_of(edge.edges[0], result)  # type: ignore[arg-type]  # its joint
            if edge.metadata is not None and edge.metadata.stream is not None:
                return edge.metadata.stream
        index = _device_of(result)
        if index is not None and index != self._home.device:  # there are several GPUs
            return self._before.get(index) or self._streams.current(self._xp, index)
        return self._home if isinstance(edge, Leaf) else self._usual

    def _use(self, stream: Any) -> None:
        if stream == self._at:
            return
        if stream.device not in self._before:
            self._before[stream.device] = self._streams.current(self._xp, stream.device)
        if stream != self._home:
            self._used[stream] = None
        stream.use()
        self._at = stream

    @staticmethod
    def _name_failed_op(error: Exception, node: Node) -> None:
        """Raises: CudaError if CUDA reported `error`, naming the op whose backward ran."""
        inputs = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in node.saved if hasattr(x, "shape"))
        errors, op = _device.runtime().cuda_errors, f"the backward of {node.op.name}"
        named = errors.attribute_to_op(error, op, inputs or "not saved", forward_line(node))
        if named is not error:
            raise named from error


def _device_of(result: Any) -> int | None:
    """The GPU that a gradient is on; None for one on the CPU, and for none."""
    if isinstance(result, list):  # of an op with several results
        result = next((gradient for gradient in result if gradient is not None), None)
    array = getattr(result, "gradient", result)
    return getattr(getattr(array, "device", None), "id", None)  # NumPy's arrays are on "cpu"
