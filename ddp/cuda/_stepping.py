"""`graphed_step`: a whole training step as one CUDA graph, captured after a few eager calls and launched from then on.

A small model's step is bound by the host, which needs some microseconds for every kernel; a graph needs one launch for
all of them. The price is that nothing but the inputs' numbers may change from step to step. So whatever else a step
depends on is compared before each launch, and where it has changed the step is captured anew.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp import _device
from ddp._cuda import capture, stream_order
from ddp._device import device
from ddp._engine import Leaf, modes
from ddp._tensor.base import TensorBase
from ddp.cuda._naming import origin
from ddp.cuda._replaying import Recorded, Slot, detached, flatten_outputs, static
from ddp.cuda._signature import Surroundings, flatten, modes_now, rebuilt
from ddp.cuda.graphs import CUDAGraph, graph
from ddp.errors import ArgumentError, CaptureError, DeviceError

_OFTEN, _FEW = 8, 20  # captures after which a word is said, unless there are so many calls for each


def graphed_step(
    fn: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    keep: int = 8,
    modules: Iterable[Any] = (),
    fallback: str | None = None,
    capture_error_mode: str = "thread_local",
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
    over, its globals and its object. fallback: "eager": what cannot be captured is run without a graph, and said once;
    None: it raises

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
    the op and the line: what makes the host wait (item, numpy, print, bool(), a boolean mask), tensors of the CPU,
    copies from pageable memory. Nothing of that step has happened then, and the next call may be made.
    """
    if fn is None:
        options: dict[str, Any] = {"warmup": warmup, "keep": keep, "modules": tuple(modules), "fallback": fallback}
        return lambda fn: graphed_step(fn, capture_error_mode=capture_error_mode, **options)
    return GraphedStep(fn, warmup, keep, tuple(modules), fallback, capture_error_mode)


class GraphedStep:
    """What `graphed_step` returns: called like the step itself.

    captures: how many graphs were made; replays: how many launches of one; eager: how many calls ran without
    """

    def __init__(
        self, fn: Callable[..., Any], warmup: int, keep: int, modules: Sequence[Any], fallback: str | None, mode: str
    ) -> None:
        if not callable(fn):
            raise ArgumentError(f"graphed_step: expected a function, got {type(fn).__name__}; options go by name")
        if warmup < 1 or keep < 1:
            raise ArgumentError(f"graphed_step: warmup and keep are at least 1, got {warmup} and {keep}")
        if fallback not in (None, "eager"):
            raise ArgumentError(f"graphed_step: fallback is None or 'eager', not {fallback!r}")
        functools.update_wrapper(self, fn)
        self.captures = self.replays = self.eager = 0
        self._fn, self._warmup, self._keep, self._fallback, self._mode = fn, warmup, keep, fallback, mode
        self._given = modules
        self._xp = device("cuda").xp
        self._stream = self._xp.cuda.Stream(non_blocking=True)
        self._device = self._xp.cuda.Device().id
        self._pool: Any = None
        self._around: Surroundings | None = None
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._leaves: dict[Leaf, None] = {}
        self._told_often = False
        self._met = 0  # kinds of calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.now() is not None:
            return self._fn(*args, **kwargs)  # part of a larger graph
        tensors: list[TensorBase] = []
        key = (flatten((args, kwargs), tensors), modes_now())
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(1 if self.captures else self._warmup)
            self._met += 1
        if self._around is not None and not kind.eager:
            state = self._around.state()
            for recorded in kind.recorded:
                if recorded.state == state and recorded.fits():
                    self._kinds.move_to_end(key)
                    self.replays += 1
                    return recorded.replay(tensors)
        return self._anew(key, kind, args, kwargs, tensors)

    def reset(self) -> None:
        """Lets go of all graphs; the next calls warm up anew."""
        self._kinds.clear()
        self._pool = self._around = None

    def _anew(self, key: Hashable, kind: _Kind, args: Any, kwargs: Any, tensors: list[TensorBase]) -> Any:
        self._tell()
        for each in tensors:
            if each.device.type == "cuda" and each.device.index != self._device:
                raise DeviceError(
                    f"graphed_step: an argument is on {each.device}, and this step runs on cuda:{self._device}, which "
                    "was the current device when it was made"
                )
        if kind.warmup > 0 or kind.eager:
            kind.warmup -= 1
            self.eager += 1
            return self._eagerly(args, kwargs, tensors)
        if self._around is None:
            self._around = Surroundings(self._fn, self._given)
        try:
            recorded = self._capture(args, kwargs, tensors)
        except CaptureError as error:
            if self._fallback is None:
                raise
            warnings.warn(f"graphed_step runs eagerly from now on: {error}", stacklevel=3)
            kind.eager = True
            self.eager += 1
            return self._eagerly(args, kwargs, tensors)
        kind.recorded.insert(0, recorded)
        self._kinds.move_to_end(key)
        self._forget()
        self.captures += 1
        self.replays += 1
        return recorded.replay(tensors)

    def _forget(self) -> None:
        """Lets go of the graphs that were unused for longest, beyond as many as are kept."""
        count = sum(len(kind.recorded) for kind in self._kinds.values())
        for key in list(self._kinds)[:-1]:
            if count <= self._keep:
                return
            count -= len(self._kinds.pop(key).recorded)
        del next(reversed(self._kinds.values())).recorded[self._keep :]

    def _tell(self) -> None:
        """Says once that graphs do not pay here."""
        calls, anew = self.replays + self.eager, max(self.captures, self._met)
        if self._told_often or anew < _OFTEN or calls >= _FEW * anew:
            return
        self._told_often = True
        warnings.warn(
            f"graphed_step: {calls} calls of {self._met} kinds have led to {self.captures} captures, and each costs "
            "more than an eager step. What changes from call to call? Shapes, constants among the arguments, modes of "
            "modules, whether gradients are there before it",
            stacklevel=4,
        )

    def _eagerly(self, args: Any, kwargs: Any, tensors: list[TensorBase]) -> Any:
        here = stream_order.current(self._xp, self._device)
        there = stream_order.DeviceStream(self._xp, self._device, self._stream)
        there.after(here)
        with stream_order.StreamGuard(there), self._following():
            inputs = [_on_gpu(x) for x in tensors]
            args, kwargs = rebuilt((args, kwargs), inputs)
            outputs = self._fn(*args, **kwargs)
        here.after(there)
        found: list[TensorBase] = []
        flatten_outputs(outputs, found)
        for each in found:
            if each.device is not _device.CPU:  # made on that stream, and read on this one
                stream_order.record(each.array, here)
        return rebuilt(outputs, [detached(x) for x in found])

    @contextmanager
    def _following(self) -> Iterator[None]:
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

    def _capture(self, args: Any, kwargs: Any, tensors: list[TensorBase]) -> Recorded:
        assert self._around is not None
        state, settings = self._around.state(), self._around.settings()
        inputs = [static(self._xp, x) for x in tensors]
        for leaf in self._leaves:
            leaf.grad_buffer.lent = False  # its memory is the graph's from now on, whoever reads param.grad
        start = [Slot(leaf) for leaf in self._leaves]
        random = _device.thread_generator(_device.CPU).snapshot()
        made = CUDAGraph()
        found: list[TensorBase] = []
        if self._pool is None:
            self._pool = capture.private_pool(self._xp)
        try:
            on = self._xp.cuda.Device(self._device)
            with on, graph(made, self._pool, self._stream, self._mode), self._following(), _guarded():
                args, kwargs = rebuilt((args, kwargs), inputs)
                outputs = self._fn(*args, **kwargs)
                flatten_outputs(outputs, found)
                elsewhere = next((x for x in found if x.device.type == "cpu"), None)
                if elsewhere is not None:
                    raise CaptureError(f"the step returns a tensor of the CPU, of shape {elsewhere.array.shape}")
                if self._around.state() != state or self._around.replaced():
                    raise CaptureError(_replacing(self._around))
                if self._around.settings() != settings:
                    raise CaptureError("the step changes an optimizer's settings: call scheduler.step() after it")
        except BaseException as error:
            for each in start:
                each.restore()
            _device.thread_generator(_device.CPU).restore(random)
            if isinstance(error, CaptureError) and capture.broken(_first(error)):
                raise
            if isinstance(error, CaptureError) or capture.refused(error):
                op, line = origin(_first(error))
                raise CaptureError(_sentence(op, line, _first(error))) from error
            raise
        leaves = {each.leaf for each in start}
        start += [Slot.empty(leaf) for leaf in self._leaves if leaf not in leaves]
        outputs = rebuilt(outputs, [detached(x) for x in found])
        return Recorded(self._xp, made, state, inputs, outputs, start, [Slot(leaf) for leaf in self._leaves])


class _Kind:
    """What is known of one kind of call. warmup: how many are still to run eagerly; recorded: newest first"""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.eager = False  # for good: it cannot be captured
        self.recorded: list[Recorded] = []


@contextmanager
def _guarded() -> Iterator[None]:
    """In the body, ops on tensors of the CPU are refused: their numbers would be constants of the graph."""
    state = modes.state
    autocast: Any = state.autocast
    observers = state.observers
    # A new cache: what was cast before the capture would be cast no more in the graph.
    state.autocast = _Refusing() if autocast is None else type(autocast)(autocast.rules, autocast.caches)
    state.observers = (_refuse_node, *observers)
    try:
        yield
    finally:
        state.autocast, state.observers = autocast, observers


class _Refusing:
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


def _on_gpu(x: TensorBase) -> Any:
    there: Any = x
    return x if x.device.type == "cuda" else there.to("cuda", non_blocking=True)


def _first(error: BaseException) -> BaseException:
    """What was raised in the step, below what was made of it."""
    while isinstance(error, CaptureError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _replacing(around: Surroundings) -> str:
    names = around.replaced()
    what = f"{', '.join(names[:4])} by other tensors" if names else "what the step found before it"
    return f"the step replaces {what}: a graph goes on reading the old memory. Write in place: x.copy_(y), x.add_(y)"


def _sentence(op: str, line: str, error: BaseException) -> str:
    if isinstance(error, CaptureError):
        return f"graphed_step: `{op}` at {line} cannot be part of a CUDA graph: {error}"
    if isinstance(error, NotImplementedError):
        return f"graphed_step: `{op}` at {line} cannot be part of a CUDA graph: {error}"
    return (
        f"graphed_step: `{op}` at {line} cannot be part of a CUDA graph, as the host would have to wait for the device "
        f"({error}). Return the tensor, and read it after the call; or pass fallback='eager'"
    )
