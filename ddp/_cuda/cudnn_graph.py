"""Graphs of cuDNN operations. An execution plan is built once for each graph, and runs on CuPy's current stream.

A graph is given by its operation, the shapes, strides and dtypes of its tensors, and its options. Each thread builds
its own plans.

`nvidia-cudnn-frontend` (the module `cudnn`) describes a graph to cuDNN, which returns execution plans. A plan runs on
addresses. If cuDNN supports no plan for a graph, that is cached, too: the reason is logged once, and the op uses its
array formulas. Without cuDNN there is a warning. `cudnn` is imported when an op on a GPU first needs it.

Building a plan takes milliseconds to seconds, and is not captured in a CUDA graph. Running a plan allocates from CuPy's
pool alone, and can be captured.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ddp._cuda.capture import now
from ddp._cuda.stream_order import current
from ddp.errors import how_to_install, warn_once

Array = Any
log = logging.getLogger("ddp.backends.cudnn")


class Settings:
    """The user's settings, set through `ddp.backends.cudnn`.

    enabled: if False, array formulas are used instead of cuDNN
    benchmark: times several plans for a graph when it is first used, and keeps the fastest; not for the backward of
        attention, and not while a CUDA graph is captured
    deterministic: only plans that give the same bits in every run
    allow_tf32: factors of float32 may be rounded to 10 bits of mantissa; on by default, as in PyTorch for convolutions
    """

    __slots__ = ("allow_tf32", "benchmark", "deterministic", "enabled")

    def __init__(self) -> None:
        self.enabled = True
        self.benchmark = False
        self.deterministic = False
        self.allow_tf32 = True


settings = Settings()


class TensorSpec(NamedTuple):
    """The description of an array for cuDNN. strides: in elements"""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def tensor_spec(x: Array, strides: tuple[int, ...] | None = None) -> TensorSpec:
    """The description of x. strides: in elements; replace x's own strides, which mean nothing on axes of one element"""
    item = x.itemsize
    return TensorSpec(
        tuple(x.shape), tuple([n // item for n in x.strides]) if strides is None else strides, x.dtype.name
    )


# cuDNN's names of dtypes, by NumPy's.
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "int64": "INT64"}


class GraphBuilder:
    """A graph under construction. Each tensor has a number (uid), by which `ExecutionPlan.run` passes its address.

    io: the default dtype of inputs and outputs; everything is computed in float32
    """

    def __init__(self, cudnn: Any, io: str, handle: Any) -> None:
        self.cudnn = cudnn
        compute = cudnn.data_type.FLOAT
        self.raw = cudnn.pygraph(
            io_data_type=self.type(io), intermediate_data_type=compute, compute_data_type=compute, handle=handle
        )

    def type(self, name: str) -> Any:
        """cuDNN's constant for a dtype."""
        return getattr(self.cudnn.data_type, _TYPES[name])

    def input(self, uid: int, spec: TensorSpec) -> Any:
        """Adds an input of the graph."""
        shape, strides, dtype = spec
        return self.raw.tensor(dim=list(shape), stride=list(strides), data_type=self.type(dtype), uid=uid)

    def output(self, uid: int, tensor: Any, spec: TensorSpec) -> None:
        """Makes `tensor`, the result of an operation, an output of the graph."""
        tensor.set_output(True).set_data_type(self.type(spec.dtype)).set_uid(uid)
        tensor.set_dim(list(spec.shape)).set_stride(list(spec.strides))


# A function that adds the operations of a graph.
Build = Callable[[GraphBuilder], None]

# In addition to cudnnGraphNotSupportedError, the errors that versions of the frontend raise for an unsupported graph.
_NOT_SUPPORTED = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)

# Maximum number of plans to time, in cuDNN's order of preference. PyTorch's benchmark_limit has the same default.
_TIMED_PLANS = 10


class ExecutionPlan:
    """A built graph. workspace: size in bytes; index: of the fastest plan, None if cuDNN chooses the plan"""

    __slots__ = ("graph", "index", "workspace")

    def __init__(self, graph: Any, workspace: int, index: int | None) -> None:
        self.graph = graph
        self.workspace = workspace
        self.index = index

    def run(self, xp: Any, handle: Any, arrays: Mapping[int, Array]) -> None:
        """Runs the plan on the handle's stream. arrays: by uid, arrays or addresses"""
        addresses = {uid: x if type(x) is int else x.data.ptr for uid, x in arrays.items()}
        # The workspace may be dropped before the work is done: the pool reuses memory in the order of this stream.
        workspace = xp.empty(self.workspace, "uint8") if self.workspace else None
        address = 0 if workspace is None else workspace.data.ptr
        if self.index is None:
            self.graph.execute(addresses, address, handle=handle)
        else:
            self.graph.execute_plan_at_index(addresses, address, self.index, handle=handle)


class CudnnLibrary:
    """cuDNN for one device and one thread: a handle, and the plans that were built with it.

    Each thread has its own, because a handle launches on one stream at a time.
    """

    def __init__(self, cudnn: Any, xp: Any) -> None:
        self.cudnn = cudnn
        self.xp = xp
        self._not_supported = (*_NOT_SUPPORTED, cudnn.cudnnGraphNotSupportedError)
        self.handle = cudnn.create_handle()
        self._stream: int | None = None
        self._plans: dict[Any, ExecutionPlan | None] = {}

    def plan(self, key: Any, io: str, build: Build, arrays: Mapping[int, Array]) -> ExecutionPlan | None:
        """The plan of the graph with this key, built at the first call; None if cuDNN does not support the graph."""
        key = (key, settings.deterministic, settings.benchmark, io == "float32" and settings.allow_tf32)
        if key in self._plans:
            return self._plans[key]
        try:
            plan: ExecutionPlan | None = self._build(io, build, arrays)
        except self._not_supported as error:
            plan = None
            log_once(f"no plan for {key[0]}: {_first_line(error)}")
        self._plans[key] = plan
        return plan

    def _build(self, io: str, build: Build, arrays: Mapping[int, Array]) -> ExecutionPlan:
        cudnn = self.cudnn
        graph = GraphBuilder(cudnn, io, self.handle)
        build(graph)
        raw = graph.raw
        raw.validate()
        raw.build_operation_graph()
        raw.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        for note in rejected_notes(io):
            raw.deselect_numeric_notes([getattr(cudnn.numerical_note, note)])
        raw.check_support()
        if settings.benchmark and arrays and not current(self.xp).capturing:
            self.bind()
            return self._fastest(raw, arrays)
        raw.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
        return ExecutionPlan(raw, raw.get_workspace_size(), None)

    def _fastest(self, raw: Any, arrays: Mapping[int, Array]) -> ExecutionPlan:
        """Times the first plans on `arrays`, and returns the fastest. The host waits, as in PyTorch."""
        fastest = None
        least = float("inf")
        timed = 0
        for index in range(raw.get_execution_plan_count()):
            if timed == _TIMED_PLANS:
                break
            try:
                raw.build_plan_at_index(index)
                plan = ExecutionPlan(raw, raw.get_workspace_size_plan_at_index(index), index)
                milliseconds = min(self._time(plan, arrays) for _ in range(3))
            except self._not_supported:  # cuDNN refuses the plan, or there is no memory for its workspace
                continue
            timed += 1
            if milliseconds < least:
                fastest = plan
                least = milliseconds
        if fastest is None:
            raise RuntimeError("none of the plans could be built")
        return fastest

    def _time(self, plan: ExecutionPlan, arrays: Mapping[int, Array]) -> float:
        """Runs a plan once. Returns: milliseconds."""
        xp = self.xp
        start = xp.cuda.Event()
        end = xp.cuda.Event()
        start.record()
        plan.run(xp, self.handle, arrays)
        end.record()
        end.synchronize()
        return float(xp.cuda.get_elapsed_time(start, end))

    def bind(self) -> None:
        """Makes the handle launch on the current stream. Calls cuDNN only if the stream changed, to save time."""
        stream = self.xp.cuda.get_current_stream().ptr
        if stream != self._stream:
            self.cudnn.set_stream(handle=self.handle, stream=stream)
            self._stream = stream


def rejected_notes(io: str) -> list[str]:
    """The numerical notes of cuDNN that are not accepted: plans with one of them are not used."""
    notes = ["DOWN_CONVERT_INPUTS"]
    if settings.deterministic:
        notes.append("NONDETERMINISTIC")
    if io == "float32" and not settings.allow_tf32:
        notes.append("TENSOR_CORE")
    return notes


class _ThreadLibraries(threading.local):
    """This thread's libraries, by array module and device."""

    def __init__(self) -> None:
        self.libraries: dict[tuple[Any, int], CudnnLibrary | None] = {}


_thread = _ThreadLibraries()


@functools.cache
def log_once(reason: str) -> None:
    """Logs at the level INFO why cuDNN is not used for a graph, once for each reason."""
    log.info("cuDNN is not used: %s", reason)


def _warn_without_cudnn(reason: str) -> None:
    warn_once(
        f"cuDNN is not used: {reason}. Convolution and attention on a GPU take much slower ways; the extras cuda12 "
        f"and cuda13 bring cuDNN: {how_to_install('cuda12')}, or [cuda13]",
        stacklevel=3,
        category=RuntimeWarning,
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


class _NoTorch:
    """A finder for `sys.meta_path` that hides PyTorch from the thread that made it.

    The frontend does not need PyTorch, but imports it if it is installed. That takes seconds.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Finds nothing. Raises: ModuleNotFoundError for torch, in the thread that made this finder."""
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not imported for cuDNN's sake", name=name)


def _import_frontend() -> Any:
    """Imports `cudnn` without PyTorch, unless this process has already imported PyTorch."""
    no_torch = _NoTorch()
    # The list is replaced, not changed: another thread may be iterating over it.
    sys.meta_path = [no_torch, *sys.meta_path]
    try:
        import cudnn
    finally:
        sys.meta_path = [finder for finder in sys.meta_path if finder is not no_torch]
    return cudnn


# The module `cudnn`, or a string that says why there is none. Empty before the first call of `module`.
_loaded: list[Any] = []


def module() -> Any:
    """The module `cudnn`, imported at the first call; None if it or cuDNN itself is missing."""
    if not _loaded:
        try:
            cudnn = _import_frontend()
            cudnn.backend_version()  # raises without the library
            _loaded.append(cudnn)
        except Exception as error:  # ImportError without the package, others without the library
            _loaded.append(_first_line(error))
    return None if isinstance(_loaded[0], str) else _loaded[0]


def library(xp: Any) -> CudnnLibrary | None:
    """This thread's cuDNN on the current device, also while `settings.enabled` is off; None if there is no cuDNN.

    Attention checks `settings.enabled` in forward alone: if cuDNN computed the forward, only cuDNN can compute the
    backward. Convolution checks it in every pass.
    """
    cudnn = module()
    if cudnn is None:
        _warn_without_cudnn(_loaded[0])
        return None
    key = xp, xp.cuda.runtime.getDevice()
    if key not in _thread.libraries:
        try:
            _thread.libraries[key] = CudnnLibrary(cudnn, xp)
        except Exception as error:
            _warn_without_cudnn(f"device {key[1]}: {_first_line(error)}")
            _thread.libraries[key] = None
    return _thread.libraries[key]


def _current_settings() -> tuple[bool, ...]:
    return settings.enabled, settings.benchmark, settings.deterministic, settings.allow_tf32


def run_graph(xp: Any, key: Any, io: str, build: Build, arrays: Mapping[int, Array]) -> bool:
    """Runs the graph that `build` describes on `arrays`, by uid. Returns: False if cuDNN does not support it.

    key: identifies the graph; io: the dtype of its inputs and outputs
    """
    cudnn = library(xp)
    capture = now()
    if capture is not None and all(read is not _current_settings for read, _ in capture.guarded):
        capture.guard_value(_current_settings)
    plan = None if cudnn is None else cudnn.plan(key, io, build, arrays)
    if cudnn is None or plan is None:
        return False
    cudnn.bind()
    plan.run(xp, cudnn.handle, arrays)
    return True


def has_plan(xp: Any, key: Any, io: str, build: Build, arrays: Mapping[int, Array]) -> bool:
    """Whether cuDNN supports a graph. Also builds its plan, for `run_graph`. arrays: for timing plans; {}: no timing"""
    cudnn = library(xp)
    return cudnn is not None and cudnn.plan(key, io, build, arrays) is not None
