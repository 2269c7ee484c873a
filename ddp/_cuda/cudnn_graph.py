"""cuDNN: graphs of its operations, each built once for its shapes, and run on CuPy's current stream.

`nvidia-cudnn-frontend` (the module `cudnn`) describes a graph to the library, which answers with plans for it; a plan
runs on addresses. What the library does not support is remembered as well, and its caller takes the array formulas: the
reason is logged once. Where there is no cuDNN at all, a warning says so. Nothing here is imported before an op on a
GPU asks for it.

A first use builds a plan, which takes milliseconds to seconds, and which is no part of a graph that is being captured;
running one allocates from CuPy's pool alone, and can be captured.
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
from ddp._warnings import warn_once
from ddp.errors import how_to_install

Array = Any
log = logging.getLogger("ddp.backends.cudnn")


class Settings:
    """What the user says about cuDNN; `ddp.backends.cudnn` shows it.

    enabled: off: array formulas; benchmark: plans are timed when they are built, and the fastest one is kept;
    deterministic: only plans that give the same bits every time; allow_tf32: float32 is rounded to 10 bits of mantissa
    before it is multiplied, as PyTorch does it in convolutions
    """

    __slots__ = ("allow_tf32", "benchmark", "deterministic", "enabled")

    def __init__(self) -> None:
        self.enabled, self.benchmark, self.deterministic, self.allow_tf32 = True, False, False, True


settings = Settings()


class TensorSpec(NamedTuple):
    """What a graph knows of an array. strides: in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def tensor_spec(x: Array, strides: tuple[int, ...] | None = None) -> TensorSpec:
    """The description of an array, or of it with other `strides` where an axis of one element could have any."""
    item = x.itemsize
    return TensorSpec(
        tuple(x.shape), tuple([n // item for n in x.strides]) if strides is None else strides, x.dtype.name
    )


_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "int64": "INT64"}


class GraphBuilder:
    """A graph under construction: tensors by number, so that a plan knows which address is whose."""

    def __init__(self, cudnn: Any, io: str, handle: Any) -> None:
        self.cudnn = cudnn
        wide = cudnn.data_type.FLOAT
        self.raw = cudnn.pygraph(
            io_data_type=self.type(io), intermediate_data_type=wide, compute_data_type=wide, handle=handle
        )

    def type(self, name: str) -> Any:
        """cuDNN's name of a dtype."""
        return getattr(self.cudnn.data_type, _TYPES[name])

    def input(self, uid: int, like: TensorSpec) -> Any:
        """A tensor that is read."""
        shape, strides, dtype = like
        return self.raw.tensor(dim=list(shape), stride=list(strides), data_type=self.type(dtype), uid=uid)

    def output(self, uid: int, tensor: Any, like: TensorSpec) -> None:
        """Makes `tensor` one that is written."""
        tensor.set_output(True).set_data_type(self.type(like.dtype)).set_uid(uid)
        tensor.set_dim(list(like.shape)).set_stride(list(like.strides))


Build = Callable[[GraphBuilder], None]
# What the frontend raises for a graph that it does not take, by its version and ours, beside an error of its own.
_REFUSALS = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)

# Plans that are timed at most, of those that can be built, the library's best guess first: PyTorch's benchmark_limit.
_TIMED_PLANS = 10


class ExecutionPlan:
    """A built graph. index: of the plan that was the fastest; None: the library's own choice."""

    __slots__ = ("graph", "index", "workspace")

    def __init__(self, graph: Any, workspace: int, index: int | None) -> None:
        self.graph, self.workspace, self.index = graph, workspace, index

    def run(self, xp: Any, handle: Any, arrays: Mapping[int, Array]) -> None:
        """Runs it on the handle's stream."""
        addresses = {uid: x if type(x) is int else x.data.ptr for uid, x in arrays.items()}
        room = xp.empty(self.workspace, "uint8") if self.workspace else None
        place = 0 if room is None else room.data.ptr
        if self.index is None:
            self.graph.execute(addresses, place, handle=handle)
        else:
            self.graph.execute_plan_at_index(addresses, place, self.index, handle=handle)
        # The pool gives `room` away again in the order of the stream that it was taken on: this one.


class CudnnLibrary:
    """cuDNN for one thread on one device: a handle, and the plans that were built with it.

    Of one thread, because a handle has a stream, which belongs to whoever launches.
    refusals: what is raised for a graph that the library does not take
    """

    def __init__(self, cudnn: Any, xp: Any) -> None:
        self.cudnn, self.xp = cudnn, xp
        self.refusals = (*_REFUSALS, cudnn.cudnnGraphNotSupportedError)
        self.handle = cudnn.create_handle()
        self._stream: int | None = None
        self._plans: dict[Any, ExecutionPlan | None] = {}

    def plan(self, key: Any, io: str, build: Build, arrays: Mapping[int, Array]) -> ExecutionPlan | None:
        """The plan of a graph, built when its key first comes; None where the library has none."""
        key = key, settings.deterministic, settings.benchmark, io == "float32" and settings.allow_tf32
        if key in self._plans:
            return self._plans[key]
        try:
            plan: ExecutionPlan | None = self._built(io, build, arrays)
        except self.refusals as error:
            plan = None
            log_once(f"no plan for {key[0]}: {_first_line(error)}")
        self._plans[key] = plan
        return plan

    def _built(self, io: str, build: Build, arrays: Mapping[int, Array]) -> ExecutionPlan:
        cudnn = self.cudnn
        graph = GraphBuilder(cudnn, io, self.handle)
        build(graph)
        raw = graph.raw
        raw.validate()
        raw.build_operation_graph()
        raw.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        for note in unwanted(io):
            raw.deselect_numeric_notes([getattr(cudnn.numerical_note, note)])
        raw.check_support()
        if settings.benchmark and arrays and not current(self.xp).capturing:
            self.bind()
            return self._fastest(raw, arrays)
        raw.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
        return ExecutionPlan(raw, raw.get_workspace_size(), None)

    def _fastest(self, raw: Any, arrays: Mapping[int, Array]) -> ExecutionPlan:
        """Times the first plans on `arrays`, and keeps the fastest. The host waits, as PyTorch's does."""
        xp, best, least = self.xp, None, float("inf")
        timed = 0
        for index in range(raw.get_execution_plan_count()):
            if timed == _TIMED_PLANS:
                break
            try:
                raw.build_plan_at_index(index)
                plan = ExecutionPlan(raw, raw.get_workspace_size_plan_at_index(index), index)
                taken = min(self._timed(xp, plan, arrays) for _ in range(3))
            except self.refusals:  # a plan that cannot be built, or not in this memory
                continue
            timed += 1
            if taken < least:
                best, least = plan, taken
        if best is None:
            raise RuntimeError("none of the plans could be built")
        return best

    def _timed(self, xp: Any, plan: ExecutionPlan, arrays: Mapping[int, Array]) -> float:
        start, end = xp.cuda.Event(), xp.cuda.Event()
        start.record()
        plan.run(xp, self.handle, arrays)
        end.record()
        end.synchronize()
        return float(xp.cuda.get_elapsed_time(start, end))

    def bind(self) -> None:
        """Has the handle launch on the current stream; telling it costs microseconds, so it is told of changes only."""
        stream = self.xp.cuda.get_current_stream().ptr
        if stream != self._stream:
            self.cudnn.set_stream(handle=self.handle, stream=stream)
            self._stream = stream


def unwanted(io: str) -> list[str]:
    """The numerical notes of plans that are not taken."""
    notes = ["DOWN_CONVERT_INPUTS"]
    if settings.deterministic:
        notes.append("NONDETERMINISTIC")
    if io == "float32" and not settings.allow_tf32:
        notes.append("TENSOR_CORE")
    return notes


class _Mine(threading.local):
    """This thread's libraries by device, and the array modules that they allocate with."""

    def __init__(self) -> None:
        self.libraries: dict[tuple[Any, int], CudnnLibrary | None] = {}


_mine = _Mine()


@functools.cache
def log_once(reason: str) -> None:
    """Logs why cuDNN is not used for a graph, once for each reason."""
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
    """In `sys.meta_path`: the thread that made this does not find PyTorch.

    The frontend imports it where it is installed, which takes seconds, and can do without it.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Raises: ModuleNotFoundError for torch."""
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not imported for cuDNN's sake", name=name)


def _import_frontend() -> Any:
    """Imports `cudnn`, and keeps it from importing PyTorch, unless this process has imported PyTorch already."""
    no_torch = _NoTorch()
    # The list is replaced, not changed: another thread may be iterating over it.
    sys.meta_path = [no_torch, *sys.meta_path]
    try:
        import cudnn
    finally:
        sys.meta_path = [finder for finder in sys.meta_path if finder is not no_torch]
    return cudnn


_loaded: list[Any] = []  # the module, or why there is none; empty before it was looked for


def module() -> Any:
    """The module `cudnn` with its library, or None."""
    if not _loaded:
        try:
            cudnn = _import_frontend()
            cudnn.backend_version()  # raises where the library itself is missing
            _loaded.append(cudnn)
        except Exception as error:
            # ImportError without the package; the package raises other kinds where it finds no library.
            _loaded.append(_first_line(error))
    return None if isinstance(_loaded[0], str) else _loaded[0]


def library(xp: Any) -> CudnnLibrary | None:
    """This thread's cuDNN on the current device; None where there is none.

    Whether it is enabled is asked before a forward: what cuDNN began it ends.
    """
    cudnn = module()
    if cudnn is None:
        _warn_without_cudnn(_loaded[0])
        return None
    key = xp, xp.cuda.runtime.getDevice()
    if key not in _mine.libraries:
        try:
            _mine.libraries[key] = CudnnLibrary(cudnn, xp)
        except Exception as error:
            _warn_without_cudnn(f"device {key[1]}: {_first_line(error)}")
            _mine.libraries[key] = None
    return _mine.libraries[key]


def _switches() -> tuple[bool, ...]:
    return settings.enabled, settings.benchmark, settings.deterministic, settings.allow_tf32


def run_graph(xp: Any, key: Any, io: str, build: Build, arrays: Mapping[int, Array]) -> bool:
    """Runs the graph that `build` describes on `arrays`, by the numbers of its tensors; False: cuDNN cannot.

    key: what makes this graph another one than others; io: the dtype of what it reads and writes
    """
    mine = library(xp)
    if (capture := now()) is not None and all(look is not _switches for look, _ in capture.fixed):
        capture.fix(_switches)
    plan = None if mine is None else mine.plan(key, io, build, arrays)
    if mine is None or plan is None:
        return False
    mine.bind()
    plan.run(xp, mine.handle, arrays)
    return True


def has_plan(xp: Any, key: Any, io: str, build: Build, arrays: Mapping[int, Array]) -> bool:
    """Whether cuDNN can run this graph; it is built now, for `ran` to find. arrays: {} where nothing is timed."""
    mine = library(xp)
    return mine is not None and mine.plan(key, io, build, arrays) is not None
