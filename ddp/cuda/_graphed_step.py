"""`graphed_step`: a whole training step as one CUDA graph, captured after a few eager calls and launched from then on.

A small model's step is bound by the host, which needs some microseconds for every kernel; a graph needs one launch for
all of them. The price is that nothing but the inputs' numbers may change from step to step. So whatever else a step
depends on is compared before each launch, and where it has changed the step is captured anew.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp import _device
from ddp._cuda import capture, copies, stream_order
from ddp._device import device
from ddp._engine import Leaf, modes
from ddp._tensor.base import TensorBase, wrap
from ddp.cuda._step_state import StepState, modes_now, replace_tensors, signature, tensors_of
from ddp.cuda.graphs import CUDAGraph, graph
from ddp.errors import ArgumentError, CaptureError, DeviceError
from ddp.ops.memory_formats import empty_in_order, order_of

_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep  # contextlib, say
_WRAPPERS = ("inner", "hooked", "guarded_run")  # they bear another name than what they call


def graphed_step(
    fn: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    keep: int = 8,
    modules: Iterable[Any] = (),
) -> Any:
    """`fn`, a step such as forward, backward and update, as a CUDA graph: `step = graphed_step(step)`, or a decorator.

        @ddp.cuda.graphed_step
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

    warmup: calls that run eagerly first, on a stream beside the current one: they make gradients, optimizer state,
    communicators and workspaces. They are steps like any other. Then one call captures, and it and all later ones
    launch the graph. keep: how many graphs are kept, for as many kinds of inputs; the one unused for longest goes.
    modules: those whose mode and parameters the step depends on, beside the ones that are found in what `fn` closes
    over, its globals and its object.

    Called like `fn`. Tensors among the arguments, also in tuples, lists and dicts, are copied into memory of the
    graph, from pinned memory without waiting, which must not be written to before the stream is past it; `fn` sees
    them on the GPU, and may not keep them. Other arguments are constants of a graph each. Tensors that `fn` returns,
    detached, are the graph's: the next call writes over them, so `clone()` what is to be kept. Gradients stay in
    `param.grad`. Random numbers go on as without a graph.

    The step is captured anew for other shapes, dtypes and constants, and where modules were put into another mode, hold
    other memory or want other gradients, where gradients were there before the call that were not, where autocast or
    grad mode is another, and where an optimizer's settings changed, unless it has them in device memory.

    Nothing else of the host happens again: Python code, prints, counters and hooks ran when the step was captured.

    Raises: ArgumentError; DeviceError without a GPU; in a call, CaptureError where a step cannot be captured, naming
    the op and the line: what makes the host wait (item, numpy, print, bool(), a boolean mask), tensors of the CPU and
    copies of them. Nothing of that step has happened then, and the next call may be made.
    """
    if fn is None:
        return lambda fn: GraphedStep(fn, warmup, keep, tuple(modules))
    return GraphedStep(fn, warmup, keep, tuple(modules))


class GraphedStep:
    """The result of `graphed_step`: called like the step itself.

    captures: how many graphs were made; replays: how many launches of one; eager: how many calls ran without
    """

    def __init__(self, fn: Callable[..., Any], warmup: int, keep: int, modules: Sequence[Any]) -> None:
        if not callable(fn):
            raise ArgumentError(f"graphed_step: expected a function, got {type(fn).__name__}; options go by name")
        if warmup < 1 or keep < 1:
            raise ArgumentError(f"graphed_step: warmup and keep are at least 1, got {warmup} and {keep}")
        functools.update_wrapper(self, fn)
        self.captures = self.replays = self.eager = 0
        self._fn, self._warmup, self._keep, self._modules = fn, warmup, keep, modules
        self._xp = device("cuda").xp
        self._stream = self._xp.cuda.Stream(non_blocking=True)
        self._device = self._xp.cuda.Device().id
        self._leaves: dict[Leaf, None] = {}  # which backwards reach
        self.reset()

    def reset(self) -> None:
        """Lets go of all graphs; the next calls warm up anew."""
        self._graphs: list[CapturedStep] = []  # the one unused for longest first
        self._warmups: dict[Hashable, int] = {}  # eager calls still to make, by kind of call
        self._pool: Any = None
        self._state: StepState | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.now() is not None:
            return self._fn(*args, **kwargs)  # part of a larger graph
        tensors = tensors_of((args, kwargs), [])
        key = signature((args, kwargs)), modes_now()
        warmups = self._warmups.setdefault(key, 1 if self.captures else self._warmup)
        if warmups == 0:
            if self._state is None:
                self._state = StepState(self._fn, self._modules)
            state = self._state.now()
            found = next((each for each in self._graphs if each.key == (key, state) and each.fits()), None)
            graph = self._capture(key, args, kwargs, tensors) if found is None else found
            self._use(graph)
            return graph.replay(tensors)
        self._check_device(tensors)
        self._warmups[key] = warmups - 1
        self.eager += 1
        return self._run_eagerly(args, kwargs, tensors)

    def _use(self, graph: CapturedStep) -> None:
        """Makes a graph the last one used, and drops the first ones beyond as many as are kept."""
        self.replays += 1
        self._graphs = [*[each for each in self._graphs if each is not graph], graph][-self._keep :]

    def _check_device(self, tensors: Sequence[TensorBase]) -> None:
        for each in tensors:
            if each.device.type == "cuda" and each.device.index != self._device:
                raise DeviceError(
                    f"graphed_step: an argument is on {each.device}, and this step runs on cuda:{self._device}, which "
                    "was the current device when it was made"
                )

    def _run_eagerly(self, args: Any, kwargs: Any, tensors: list[TensorBase]) -> Any:
        here = stream_order.current(self._xp, self._device)
        there = stream_order.DeviceStream(self._xp, self._device, self._stream)
        there.after(here)
        with stream_order.StreamGuard(there), self._note_leaves():
            args, kwargs = replace_tensors((args, kwargs), [_on_gpu(x) for x in tensors])
            outputs = self._fn(*args, **kwargs)
        here.after(there)
        found = tensors_of(outputs, [])
        for each in found:
            if each.device is not _device.CPU:  # made on that stream, and read on this one
                stream_order.record(each.array, here)
        return replace_tensors(outputs, [wrap(x.array, x.device) for x in found])

    @contextmanager
    def _note_leaves(self) -> Iterator[None]:
        """In the body, the leaves that backwards reach are noted."""
        state = modes.state
        before = state.reached

        def reached(leaves: Sequence[Leaf]) -> None:
            self._leaves.update(dict.fromkeys(leaves))
            if before is not None:
                before(leaves)

        state.reached = reached
        try:
            yield
        finally:
            state.reached = before

    def _capture(self, key: Hashable, args: Any, kwargs: Any, tensors: list[TensorBase]) -> CapturedStep:
        assert self._state is not None
        self._check_device(tensors)
        state, settings = self._state.now(), self._state.settings()
        inputs = [_input_like(self._xp, x) for x in tensors]
        for leaf in self._leaves:
            leaf.grad_buffer.lent = False  # its memory is the graph's from now on, whoever reads param.grad
        start = [GradState(leaf) for leaf in self._leaves]
        random = _device.thread_generator(_device.CPU).snapshot()
        cuda_graph = CUDAGraph()
        if self._pool is None:
            self._pool = capture.private_pool(self._xp)
        try:
            on = self._xp.cuda.Device(self._device)
            with on, graph(cuda_graph, self._pool, self._stream), self._note_leaves(), _refuse_cpu():
                args, kwargs = replace_tensors((args, kwargs), inputs)
                outputs = self._fn(*args, **kwargs)
                found = tensors_of(outputs, [])
                for each in found:
                    if each.device.type == "cpu":
                        raise CaptureError(f"the step returns a tensor of the CPU, of shape {each.array.shape}")
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
            _device.thread_generator(_device.CPU).restore(random)
            named = _named(error)
            if named is error:
                raise
            raise named from error
        known = {grad.leaf for grad in start}
        start += [GradState(leaf, empty=True) for leaf in self._leaves if leaf not in known]
        end = [GradState(leaf) for leaf in self._leaves]
        self.captures += 1
        outputs = replace_tensors(outputs, [wrap(x.array, x.device) for x in found])
        return CapturedStep((key, state), self._xp, cuda_graph, inputs, outputs, start, end)


class GradState:
    """A leaf's gradient at one moment, as far as the host knows it. empty: nothing was there"""

    __slots__ = ("array", "full", "leaf", "withheld", "zeroed")

    def __init__(self, leaf: Leaf, empty: bool = False) -> None:
        buffer = leaf.grad_buffer
        self.leaf, self.array, self.full = leaf, buffer.array, buffer.full and not empty
        self.withheld, self.zeroed = (None, False) if empty else (buffer.withheld, buffer.zeroed)

    def restore(self) -> None:
        """Makes the gradient what it was."""
        buffer = self.leaf.grad_buffer
        buffer.full, buffer.array, buffer.withheld, buffer.zeroed = self.full, self.array, self.withheld, self.zeroed
        buffer.lent = False

    def matches(self) -> bool:
        """Whether a gradient is there as it was, in the same memory."""
        buffer = self.leaf.grad_buffer
        # Of an empty one the memory is forgotten, unless buckets bound it: the graph brings its own.
        return buffer.full == self.full and (buffer.array is self.array or not (self.full or buffer.bound))


class CapturedStep:
    """A step as it is launched again: its inputs are filled, the graph runs, and the host notes what it did.

    key: what a call must have in common with the one that was captured; start, end: the gradients before and after it
    """

    def __init__(
        self,
        key: tuple[Hashable, Hashable],
        xp: Any,
        cuda_graph: CUDAGraph,
        inputs: list[Any],
        outputs: Any,
        start: list[GradState],
        end: list[GradState],
    ) -> None:
        self.key = key
        self._xp, self._graph, self._inputs, self._outputs = xp, cuda_graph, inputs, outputs
        self._start, self._end = start, end
        self._results = tensors_of(outputs, [])

    def fits(self) -> bool:
        """Whether gradients lie as they did, and what the captured code has fixed is as it was."""
        return all(map(GradState.matches, self._start)) and self._graph.told.fits()

    def replay(self, tensors: Sequence[TensorBase]) -> Any:
        """Runs the step on these numbers."""
        for target, x in zip(self._inputs, tensors, strict=True):
            if x is not target:
                _fill(self._xp, target.array, x)
                target.version.count += 1
        self._graph.replay()
        for each in self._end:
            each.restore()
        # Views of the inputs may be among the outputs, and their holders must see that they were written to.
        for x in self._results:
            x.version.count += 1
        return self._outputs


def _input_like(xp: Any, x: TensorBase) -> Any:
    """Memory for an input like `x`; made outside of the graph's pool, so that no graph computes there."""
    array = empty_in_order(xp, x.array.shape, x.array.dtype, order_of(x.array))
    made = wrap(array, _device.device_of(array))
    return made.requires_grad_() if x.edge is not None else made


def _fill(xp: Any, target: Any, x: TensorBase) -> None:
    source = x.array
    if not target.flags.c_contiguous:
        order = order_of(target)
        target, source = target.transpose(order), source.transpose(order)
    if x.device.type == "cpu":
        if not copies.straight(target, source, non_blocking=True):
            target.set(source)
    elif source.flags.c_contiguous and source.nbytes:
        stream = xp.cuda.get_current_stream()
        xp.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, _DEVICE_TO_DEVICE, stream.ptr)
    else:
        target[...] = source


def _on_gpu(x: TensorBase) -> Any:
    there: Any = x
    return x if x.device.type == "cuda" else there.to("cuda", non_blocking=True)


@contextmanager
def _refuse_cpu() -> Iterator[None]:
    """In the body, ops on tensors of the CPU are refused: their numbers would be constants of the graph."""
    state = modes.state
    autocast: Any = state.autocast
    observers = state.observers
    # A new cache: what was cast before the capture would be cast no more in the graph.
    state.autocast = _RefuseCpu() if autocast is None else type(autocast)(autocast.rules, autocast.caches)
    state.observers = (_refuse_node, *observers)
    try:
        yield
    finally:
        state.autocast, state.observers = autocast, observers


class _RefuseCpu:
    """In autocast's place where there is none: it casts nothing."""

    rules: dict[str, Any] = {}  # noqa: RUF012  # as autocast has them
    caches = True

    def spares(self, op: Any, x: Any) -> bool:
        """Whether autocast keeps an op in float32 for this input's sake."""
        return False

    def __call__(self, op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        for x in inputs:
            if isinstance(x, TensorBase) and x.device is _device.CPU:
                raise CaptureError(f"{op.name} computes on the CPU, on a tensor of shape {x.array.shape}")
        return inputs


def _refuse_node(node: Any) -> None:
    if node.xp is _device.CPU.xp:
        raise CaptureError(f"{node.op.name} computes on the CPU")


def _named(error: BaseException) -> BaseException:
    """What to raise for an error in a capture: a CaptureError with the op and the line, or the step's own error."""
    first = error
    while isinstance(first, CaptureError) and first.__cause__ is not None:
        first = first.__cause__  # what was raised in the step
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
    import linecache  # for this error alone
    import traceback

    below = _libraries()
    line, op = "an unknown line", "this"
    within = True
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if name.endswith((".pyx", ".pxi")) or any(name.startswith(each) for each in below):
            break  # compiled modules name their sources
        if name.startswith(_STANDARD) and "-packages" not in name:
            continue
        if name.startswith(_OURS):
            if not within or op in _WRAPPERS:
                op, within = frame.f_code.co_name, True
            continue
        code = linecache.getline(name, number).strip()
        line, op, within = f"{name}:{number}" + (f" (`{code}`)" if code else ""), op, False
    return op, line


def _libraries() -> list[str]:
    """Where the modules lie that ops call, and that are no users' code."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("cupy", "cupy_backends", "numpy")]
    return [os.path.dirname(each) + os.sep for each in files if each]
