"""`graphed_step`: a whole training step as one CUDA graph, captured after a few eager calls.

The host needs some microseconds to launch a kernel. In the step of a small model, that limits the speed. A CUDA graph
launches all kernels at once, but every launch does the same work on the same memory: only the values in that memory can
differ. So the state that the step depends on (see `ddp.cuda._step_state`) is compared before each launch. If it has
changed, the step is captured again. Other Python values that the step reads, such as global numbers, are not compared:
they stay as they were at the capture.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp import _device
from ddp._cuda import capture, copies, memory_pool, stream_order
from ddp._device import device
from ddp._engine import Leaf, modes
from ddp._engine.grad_buffer import BOUND, EMPTY
from ddp._tensor.base import TensorBase, wrap
from ddp.cuda._step_state import StepState, arguments_key, modes_now, replace_tensors, tensors_of
from ddp.cuda.graphs import CUDAGraph, graph
from ddp.errors import ArgumentError, CaptureError, DeviceError
from ddp.ops.memory_formats import empty_in_order, order_of

# The copy kind cudaMemcpyDeviceToDevice.
_DEVICE_TO_DEVICE = 3

# The folders of `ddp` and of Python's standard library: frames of a traceback in them are not user code.
_DDP = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep

# The names of functions in `ddp` that wrap other functions. An error shows the name of the wrapped function instead.
_WRAPPERS = ("inner", "also", "form", "hooked", "guarded_run")


def graphed_step(
    fn: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    keep: int = 8,
    modules: Iterable[Any] = (),
) -> Any:
    """Makes a function that runs `fn`, a training step, as a CUDA graph. Also a decorator.

        @ddp.cuda.graphed_step
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

    warmup: the number of first calls that run without a graph, on another stream, to create gradients, optimizer state,
        communicators and workspaces. They are complete training steps. The next call captures the step and launches
        the graph; later calls launch it again. After the first capture, other arguments need only one warm-up call
    keep: the maximum number of graphs, one for each combination of inputs; the least recently used is dropped
    modules: modules that the step uses, in addition to those found in the closure, globals and object of `fn`

    The result is called like `fn`. Tensors among the arguments, also in tuples, lists and dicts, are copied into memory
    of the graph, and `fn` gets the copies, which are on the GPU. `fn` must not keep them. A tensor in pinned memory is
    copied without waiting: do not write to it before the copy is done. Other arguments are constants of a graph.
    Tensors that `fn` returns are detached, and their memory is the graph's. The next call overwrites that memory, so
    keep a `clone()`. Gradients are in `param.grad`, as without a graph. Random numbers are the same as without a graph.

    The step is captured again if one of these differs from the captured call: the shape, dtype or requires_grad of a
    tensor argument; the value of another argument; the mode, memory or requires_grad of a module; which gradients
    exist before the call; the autocast, grad, inference or anomaly mode; the TF32 setting; the settings of
    `ddp.backends.cudnn`, if the step uses cuDNN; the settings of an optimizer, unless it keeps them in device memory.

    Python code runs only in warm-up calls and when the step is captured: prints, counters and hooks do not run at a
    replay. A capture allows some ops on CPU tensors, which do not run at a replay, either: comparisons, `argmax`,
    random numbers, `fill_`, `add_` and other changes in place.

    Raises: ArgumentError if `fn` is not callable, or warmup or keep is below 1; DeviceError without a GPU. In a call:
    ArgumentError for an argument that cannot be hashed; DeviceError for a tensor on another GPU than the one that was
    current when the step was made; CaptureError if the step cannot be captured, with the op and the line. Ops that make
    the host wait (item, numpy, print, bool(), reading x[mask]) cannot be captured, and neither can copies of CPU
    tensors to the GPU, or differentiable ops on CPU tensors, such as x + 1, sum and views. A capture that fails changes
    no parameters, gradients or generators, and the step can be called again.
    """
    if fn is None:
        return lambda fn: GraphedStep(fn, warmup, keep, tuple(modules))
    return GraphedStep(fn, warmup, keep, tuple(modules))


class GraphedStep:
    """The result of `graphed_step`, called like the step itself.

    captures: the number of captures; replays: the number of launches of a graph; eager: the number of calls without a
    graph, to warm up
    """

    def __init__(self, fn: Callable[..., Any], warmup: int, keep: int, modules: Sequence[Any]) -> None:
        if not callable(fn):
            raise ArgumentError(f"graphed_step: expected a function, got {type(fn).__name__}; options go by name")
        if warmup < 1 or keep < 1:
            raise ArgumentError(f"graphed_step: warmup and keep are at least 1, got {warmup} and {keep}")
        functools.update_wrapper(self, fn)
        self.captures = self.replays = self.eager = 0
        self._fn = fn
        self._warmup = warmup
        self._keep = keep
        self._modules = modules
        self._xp = device("cuda").xp
        self._stream = self._xp.cuda.Stream(non_blocking=True)
        self._device = self._xp.cuda.Device().id
        self._leaves: dict[Leaf, None] = {}  # the leaves that a backward of the step has reached
        self.reset()

    def reset(self) -> None:
        """Drops all graphs. Each combination of arguments warms up again: once, or `warmup` times before a capture."""
        self._graphs: list[CapturedStep] = []  # the least recently used first
        self._warmups: dict[Hashable, int] = {}  # number of warm-up calls left, by key of the arguments and modes
        self._pool: Any = None
        self._state: StepState | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.now() is not None:
            return self._fn(*args, **kwargs)  # captured as part of another graph
        tensors = tensors_of((args, kwargs), [])
        key = (arguments_key((args, kwargs)), modes_now())
        warmups = self._warmups.setdefault(key, 1 if self.captures else self._warmup)
        if warmups == 0:
            if self._state is None:
                self._state = StepState(self._fn, self._modules)
            state = self._state.now()
            matching = (graph for graph in self._graphs if graph.key == (key, state) and graph.is_valid())
            graph = next(matching, None) or self._capture(key, args, kwargs, tensors)
            self._use(graph)
            return graph.replay(tensors)
        self._check_device(tensors)
        self._warmups[key] = warmups - 1
        self.eager += 1
        return self._run_eagerly(args, kwargs, tensors)

    def _use(self, graph: CapturedStep) -> None:
        """Makes a graph the most recently used one, and drops the others beyond `keep`."""
        self.replays += 1
        self._graphs = [*[other for other in self._graphs if other is not graph], graph][-self._keep :]

    def _check_device(self, tensors: Sequence[TensorBase]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cuda" and tensor.device.index != self._device:
                raise DeviceError(
                    f"graphed_step: an argument is on {tensor.device}, and this step runs on cuda:{self._device}, "
                    "which was the current device when it was made"
                )

    def _run_eagerly(self, args: Any, kwargs: Any, tensors: list[TensorBase]) -> Any:
        caller = stream_order.current(self._xp, self._device)
        side = stream_order.DeviceStream(self._xp, self._device, self._stream)
        side.wait_for(caller)
        with stream_order.StreamGuard(side), self._record_leaves():
            args, kwargs = replace_tensors((args, kwargs), [_on_gpu(x) for x in tensors])
            outputs = self._fn(*args, **kwargs)
        caller.wait_for(side)
        results = tensors_of(outputs, [])
        for result in results:
            if result.device is not _device.CPU:  # allocated on one stream, and read on the other
                stream_order.record(result.array, caller)
        return replace_tensors(outputs, [wrap(x.array, x.device) for x in results])

    @contextmanager
    def _record_leaves(self) -> Iterator[None]:
        """A context that adds to `_leaves` every leaf that a backward reaches."""
        state = modes.state
        previous = state.reached

        def reached(leaves: Sequence[Leaf]) -> None:
            self._leaves.update(dict.fromkeys(leaves))
            if previous is not None:
                previous(leaves)

        state.reached = reached
        try:
            yield
        finally:
            state.reached = previous

    def _capture(self, key: Hashable, args: Any, kwargs: Any, tensors: list[TensorBase]) -> CapturedStep:
        assert self._state is not None
        self._check_device(tensors)
        state = self._state.now()
        settings = self._state.settings()
        inputs = [_input_like(self._xp, x) for x in tensors]
        for leaf in self._leaves:
            leaf.grad_buffer.take_back()  # so that `clear` keeps this memory, to which every launch of the graph writes
        start = [GradSnapshot(leaf) for leaf in self._leaves]
        random_state = _device.thread_generator(_device.CPU).snapshot()
        cuda_graph = CUDAGraph()
        if self._pool is None:
            self._pool = memory_pool.private_pool(self._xp)
        try:
            device_context = self._xp.cuda.Device(self._device)
            with (
                device_context,
                graph(cuda_graph, self._pool, self._stream),
                self._record_leaves(),
                _refuse_cpu(),
            ):
                args, kwargs = replace_tensors((args, kwargs), inputs)
                outputs = self._fn(*args, **kwargs)
                results = tensors_of(outputs, [])
                for result in results:
                    if result.device.type == "cpu":
                        raise CaptureError(f"the step returns a tensor of the CPU, of shape {result.array.shape}")
                if self._state.now() != state or self._state.replaced():
                    names = self._state.replaced()
                    what = f"{', '.join(names[:4])} by other tensors" if names else "what the step found before it"
                    raise CaptureError(
                        f"the step replaces {what}: a graph goes on reading the old memory. Write in place: "
                        "x.copy_(y), x.add_(y)"
                    )
                if self._state.settings() != settings:
                    raise CaptureError("the step changes an optimizer's settings: call scheduler.step() after it")
        except BaseException as error:
            for grad in start:
                grad.restore()
            _device.thread_generator(_device.CPU).restore(random_state)
            explained = _explain(error)
            if explained is error:
                raise
            raise explained from error
        known = {grad.leaf for grad in start}
        start += [GradSnapshot(leaf, empty=True) for leaf in self._leaves if leaf not in known]
        end = [GradSnapshot(leaf) for leaf in self._leaves]
        self.captures += 1
        outputs = replace_tensors(outputs, [wrap(x.array, x.device) for x in results])
        return CapturedStep((key, state), self._xp, cuda_graph, inputs, outputs, start, end)


class GradSnapshot:
    """A snapshot of a leaf's gradient buffer: its state and its array, not the values. empty: records it as empty"""

    __slots__ = ("array", "leaf", "read_error", "state")

    def __init__(self, leaf: Leaf, empty: bool = False) -> None:
        buffer = leaf.grad_buffer
        self.leaf = leaf
        self.array = buffer.array
        self.state = EMPTY if empty else buffer.state
        self.read_error = None if empty else buffer.read_error

    def restore(self) -> None:
        """Sets the buffer to this state."""
        buffer = self.leaf.grad_buffer
        buffer.state = self.state
        buffer.array = self.array
        buffer.read_error = self.read_error
        buffer.take_back()

    def matches(self) -> bool:
        """Whether the buffer is full or empty as in the snapshot, and in the same memory."""
        buffer = self.leaf.grad_buffer
        # An empty buffer may have other memory: a replay gives it the graph's memory. But a buffer that is bound to a
        # bucket of a reducer must keep its memory.
        is_empty = self.state is EMPTY
        if buffer.full is is_empty:
            return False
        return buffer.array is self.array or (is_empty and buffer.memory is not BOUND)


class CapturedStep:
    """A captured step: copies inputs into the graph's memory, launches the graph, and updates the host's state.

    key: the key of the captured call (arguments, modes and state); start, end: the gradient buffers before and after it
    """

    def __init__(
        self,
        key: tuple[Hashable, Hashable],
        xp: Any,
        cuda_graph: CUDAGraph,
        inputs: list[Any],
        outputs: Any,
        start: list[GradSnapshot],
        end: list[GradSnapshot],
    ) -> None:
        self.key = key
        self._xp = xp
        self._graph = cuda_graph
        self._inputs = inputs
        self._outputs = outputs
        self._start = start
        self._end = end
        self._results = tensors_of(outputs, [])

    def is_valid(self) -> bool:
        """Whether the gradient buffers are as before the capture, and every guarded value is the same."""
        return all(map(GradSnapshot.matches, self._start)) and self._graph.captured.is_valid()

    def replay(self, tensors: Sequence[TensorBase]) -> Any:
        """Runs the step on these inputs. Returns: its outputs."""
        for target, x in zip(self._inputs, tensors, strict=True):
            if x is not target:
                _copy_input(self._xp, target.array, x)
                target.version.count += 1
        self._graph.replay()
        for grad in self._end:
            grad.restore()
        # Counts a write to every output, so that backward detects that this replay has overwritten a saved output.
        for x in self._results:
            x.version.count += 1
        return self._outputs


def _input_like(xp: Any, x: TensorBase) -> Any:
    """A new tensor like `x` for an input. It is not in the graph's pool, where kernels could overwrite it."""
    array = empty_in_order(xp, x.array.shape, x.array.dtype, order_of(x.array))
    tensor = wrap(array, _device.device_of(array))
    return tensor.requires_grad_() if x.edge is not None else tensor


def _copy_input(xp: Any, target: Any, x: TensorBase) -> None:
    source = x.array
    if not target.flags.c_contiguous:
        order = order_of(target)
        target = target.transpose(order)
        source = source.transpose(order)
    if x.device.type == "cpu":
        if not copies.copy_into(target, source, non_blocking=True):
            target.set(source)
    elif source.flags.c_contiguous and source.nbytes:
        stream = xp.cuda.get_current_stream()
        xp.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, _DEVICE_TO_DEVICE, stream.ptr)
    else:
        target[...] = source


def _on_gpu(x: Any) -> Any:
    return x if x.device.type == "cuda" else x.to("cuda", non_blocking=True)


@contextmanager
def _refuse_cpu() -> Iterator[None]:
    """A context in which ops on CPU tensors raise, because their values would be constants of the graph.

    Ops that do not run in `apply` do not raise: those without a derivative, and changes in place.
    """
    state = modes.state
    autocast: Any = state.autocast
    observers = state.observers
    # With an empty cache: a cast that was cached before the capture would not be part of the graph.
    state.autocast = _NoCasts() if autocast is None else type(autocast)(autocast.rules, autocast.caches, _check_inputs)
    state.observers = (_check_node, *observers)  # checks nodes that ops do not make, such as those of a `Function`
    try:
        yield
    finally:
        state.autocast = autocast
        state.observers = observers


def _check_inputs(op: Any, inputs: Sequence[Any]) -> None:
    """Raises: CaptureError if an input is on the CPU."""
    for x in inputs:
        if isinstance(x, TensorBase) and x.device is _device.CPU:
            raise CaptureError(f"{op.name} computes on the CPU, on a tensor of shape {x.array.shape}")


def _check_node(node: Any) -> None:
    """Raises: CaptureError if a recorded node computes on the CPU."""
    if node.xp is _device.CPU.xp:
        raise CaptureError(f"{node.op.name} computes on the CPU")


class _NoCasts:
    """Takes the place of autocast if autocast is off: checks the inputs of ops, and casts nothing.

    An autocast that is entered inside the capture takes over `check`.
    """

    check = staticmethod(_check_inputs)

    def spares(self, op: Any, x: Any) -> bool:
        """Returns False. See `spares` in `ddp.amp.autocast_mode`."""
        return False

    def __call__(self, op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        self.check(op, inputs)
        return inputs


def _explain(error: BaseException) -> BaseException:
    """The error to raise for an error in a capture: a CaptureError with op and line, or the step's own error."""
    first = error
    while isinstance(first, CaptureError) and first.__cause__ is not None:
        first = first.__cause__  # the error inside the step
    if not (isinstance(error, CaptureError) or capture.refused(error)) or capture.broken(first):
        return error
    op, line = _origin(first)
    reason = f": {first}"
    if not isinstance(first, CaptureError | NotImplementedError):
        reason = (
            f", as the host would have to wait for the device ({first}). Return the tensor, and read it after the call"
        )
    return CaptureError(f"graphed_step: `{op}` at {line} cannot be part of a CUDA graph{reason}")


def _origin(error: BaseException) -> tuple[str, str]:
    """The op, and the line of user code that called it: ("item", "train.py:88 (`loss.item()`)")."""
    import linecache  # here, because only errors need it
    import traceback

    libraries = _libraries()
    line = "an unknown line"
    op = "this"
    in_ddp = True
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        # Frames of compiled modules have the names of their Cython sources.
        if name.endswith((".pyx", ".pxi")) or any(name.startswith(folder) for folder in libraries):
            break
        if name.startswith(_STANDARD) and "-packages" not in name:
            continue
        if name.startswith(_DDP):
            if not in_ddp or op in _WRAPPERS:
                op = frame.f_code.co_name
                in_ddp = True
            continue
        code = linecache.getline(name, number).strip()
        line = f"{name}:{number}" + (f" (`{code}`)" if code else "")
        in_ddp = False
    return op, line


def _libraries() -> list[str]:
    """The folders of CuPy and NumPy, whose frames are not user code."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("cupy", "cupy_backends", "numpy")]
    return [os.path.dirname(file) + os.sep for file in files if file]
