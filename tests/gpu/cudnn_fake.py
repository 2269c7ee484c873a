"""cuDNN without a GPU: a module `cudnn` with the interface of nvidia-cudnn-frontend 1.26, as far as ours uses it.

A graph checks what the real one checks when it is validated (ranks, strides, sizes, dtypes, what cuDNN's attention and
convolutions take), insists on the order of calls, and computes with NumPy on the stream of its handle, on nothing but
the addresses that it is given. What cuDNN lacks raises its `cudnnGraphNotSupportedError`, as there.

Which graphs the real library accepts was tried on its wheel (9.28, frontend 1.26) on a machine without a GPU, by the
properties of an H200: it built plans for all convolutions of the tests' kinds, and supports all kinds of attention, but
not the backward of heads wider than 128.
"""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from ddp._cuda import cudnn_graph
from ddp.ops.convolution import Shape, Window, adjoint, correlate

data_type = enum.Enum("data_type", "NOT_SET HALF BFLOAT16 FLOAT DOUBLE INT32 INT64")
heur_mode = enum.Enum("heur_mode", "A B FALLBACK")
build_plan_policy = enum.Enum("build_plan_policy", "HEURISTICS_CHOICE ALL")
numerical_note = enum.Enum("numerical_note", "TENSOR_CORE DOWN_CONVERT_INPUTS NONDETERMINISTIC")
diagonal_alignment = enum.Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
_NAMES = {"HALF": "f2", "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": "f4", "INT64": "i8"}
DTYPES = {data_type[name]: np.dtype(kind) for name, kind in _NAMES.items()}
WORKSPACE = 512
ALIGNMENT = 16  # bytes
# Each operation by its name: the tensors that it reads, how many it writes, and all parameters that ours passes.
OPERATIONS = {
    "conv_fprop": (("image", "weight"), 1, ("padding", "stride", "dilation")),
    "conv_dgrad": (("loss", "filter"), 1, ("padding", "stride", "dilation")),
    "conv_wgrad": (("image", "loss"), 1, ("padding", "stride", "dilation")),
    "sdpa": (
        ("q", "k", "v"),
        2,
        ("attn_scale", "generate_stats", "dropout", "diagonal_alignment", "diagonal_band_right_bound"),
    ),
    "sdpa_backward": (
        ("q", "k", "v", "o", "dO", "stats"),
        3,
        ("attn_scale", "use_deterministic_algorithm", "dropout", "diagonal_alignment", "diagonal_band_right_bound"),
    ),
}


class cudnnGraphNotSupportedError(Exception):  # its name, and its base
    """What the library has no engine for."""


def needs(condition: bool, text: str) -> None:
    if not condition:
        raise cudnnGraphNotSupportedError(text)


class Tensor:
    """A tensor of a graph."""

    def __init__(self, dim: Sequence[int] = (), stride: Sequence[int] = (), kind: Any = None, uid: int = 0) -> None:
        assert len(dim) == len(stride)
        self.dim = dim
        self.stride = stride
        self.kind = kind
        self.uid = uid
        self.is_output = False

    def check(self) -> None:
        assert self.kind in DTYPES
        assert type(self.dim) is type(self.stride) is list
        assert len(self.dim) == len(self.stride)
        assert all(type(n) is int for n in (*self.dim, *self.stride))
        assert min(self.dim) > 0
        assert self.uid > 0

    @property
    def order(self) -> str:
        """In which order the axes lie, if there are no gaps: first, last (channels), or neither."""
        axes = range(len(self.dim))
        for name, order in (("first", [*axes]), ("last", [0, *axes[2:], 1])):
            step = 1
            fits = True
            for axis in reversed(order):
                fits = fits and self.stride[axis] == step
                step *= self.dim[axis]
            if fits:
                return name
        return "neither"

    def at(self, addresses: dict[int, int]) -> Any:
        """Its memory as an array."""
        dtype = DTYPES[self.kind]
        span = sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True)) + 1
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(addresses[self.uid])
        flat = np.frombuffer(memory, np.uint8).view(dtype)
        return np.lib.stride_tricks.as_strided(flat, self.dim, [s * dtype.itemsize for s in self.stride])


for _name, _field in (("output", "is_output"), ("data_type", "kind"), ("uid", "uid"), ("dim", "dim"), ("stride",) * 2):
    setattr(Tensor, f"set_{_name}", lambda self, value, field=_field: setattr(self, field, value) or self)


class Graph:
    """`cudnn.pygraph` of one operation: calls must come in the library's order."""

    STEPS = ("made", "validated", "built", "planned", "supported", "ready")

    def __init__(self, fake: Fake, io: Any, intermediate: Any, compute: Any, handle: Any) -> None:
        assert io in DTYPES
        assert intermediate is compute is data_type.FLOAT
        assert handle in fake.streams
        self.fake = fake
        self.io = io
        self.tensors: list[Tensor] = []
        self.unwanted: set[Any] = set()
        self.name = ""
        self.step = "made"

    def tensor(self, dim: list[int], stride: list[int], data_type: Any, uid: int) -> Tensor:
        self.tensors.append(Tensor(dim, stride, data_type, uid))
        return self.tensors[-1]

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(name)
        read, count, parameters = OPERATIONS[name]

        def operation(**options: Any) -> Any:
            assert not self.name, "a graph of one operation"
            assert set(options) <= {*read, *parameters}, f"{name} takes no {set(options) - {*read, *parameters}}"
            made = [Tensor(kind=self.io) for _ in range(count)]
            self.tensors += made
            self.name = name
            self.inputs = {key: options.pop(key) for key in read}
            self.made = made
            self.options = options
            return made if count > 1 else made[0]

        return operation

    def _to(self, step: str) -> None:
        assert self.STEPS.index(step) == self.STEPS.index(self.step) + 1, f"{step} after {self.step}"
        self.step = step

    def validate(self) -> None:
        self._to("validated")
        for tensor in self.tensors:
            tensor.check()
        assert all(each.is_output for each in self.made)
        assert len({tensor.uid for tensor in self.tensors}) == len(self.tensors)
        check = check_attention if "sdpa" in self.name else check_convolution
        check(self)
        needs(not self.fake.lacks(self.name), f"no {self.name}")

    def build_operation_graph(self) -> None:
        self._to("built")

    def create_execution_plans(self, modes: list[Any]) -> None:
        assert modes
        assert all(isinstance(mode, heur_mode) for mode in modes)
        self._to("planned")

    def deselect_numeric_notes(self, notes: list[Any]) -> None:
        assert self.step == "planned"
        self.unwanted |= set(notes)

    def check_support(self) -> None:
        self._to("supported")

    def build_plans(self, policy: Any) -> None:
        assert policy is build_plan_policy.HEURISTICS_CHOICE
        self._to("ready")

    def get_workspace_size(self) -> int:
        assert self.step == "ready"
        return WORKSPACE if "grad" in self.name or "backward" in self.name else 0

    def get_execution_plan_count(self) -> int:
        return self.fake.plans

    def build_plan_at_index(self, index: int) -> None:
        assert self.step in ("supported", "ready")
        needs(index != 1, "this one cannot be built")
        self.step = "ready"

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.get_workspace_size()

    def execute(self, pack: dict[int, int], workspace: int, handle: Any) -> None:
        assert self.step == "ready"
        assert (workspace != 0) == (self.get_workspace_size() > 0)
        assert set(pack) == {each.uid for each in self.tensors}
        assert all(type(each) is int and each for each in pack.values())
        # What the front end declares of every tensor; plans are chosen for it, and loads of several elements trap.
        odd = [t.uid for t in self.tensors if math.prod(t.dim) > 1 and pack[t.uid] % ALIGNMENT]
        assert not odd, f"tensors {odd} are not aligned to {ALIGNMENT} bytes"
        assert workspace % ALIGNMENT == 0
        addresses = dict(pack)

        def work() -> None:
            if workspace:
                ctypes.memset(workspace, 0xFF, WORKSPACE)
            inputs = {name: each.at(addresses).astype("f4") for name, each in self.inputs.items()}
            with np.errstate(all="ignore"):
                results = attend(self, inputs, addresses) if "sdpa" in self.name else [convolve(self, inputs)]
            for tensor, value in zip(self.made, results, strict=True):
                tensor.at(addresses)[...] = value.astype(DTYPES[tensor.kind])

        self.fake.ran.append(self.name)
        self.fake.put(self.fake.streams[handle], f"cudnn {self.name}", work)

    def execute_plan_at_index(self, pack: dict[int, int], workspace: int, index: int, handle: Any) -> None:
        self.fake.indices.append(index)
        self.execute(pack, workspace, handle)


# Convolutions: by the CPU's formulas --------------------------------------------------------------------------------


def _operands(graph: Graph) -> tuple[Tensor, Tensor, Tensor, Window]:
    """The image, the filters, the result of the convolution, and how the filters walk."""
    made = graph.made[0]
    read = graph.inputs
    image, kernel, out = {
        "conv_fprop": lambda: (read["image"], read["weight"], made),
        "conv_dgrad": lambda: (made, read["filter"], read["loss"]),
        "conv_wgrad": lambda: (read["image"], made, read["loss"]),
    }[graph.name]()
    steps = [tuple(graph.options[name]) for name in ("stride", "padding", "dilation")]
    return image, kernel, out, Window(tuple(image.dim[2:]), tuple(kernel.dim[2:]), *steps)


def check_convolution(graph: Graph) -> None:
    image, kernel, out, window = _operands(graph)
    assert len(image.dim) == len(kernel.dim) == len(out.dim) == 4
    assert image.dim[1] % kernel.dim[1] == 0
    assert kernel.dim[0] % (image.dim[1] // kernel.dim[1]) == 0
    assert out.dim[:2] == [image.dim[0], kernel.dim[0]]
    needs(out.dim[2:] == [*window.out], f"sizes {out.dim}")
    kinds = {each.kind for each in (image, kernel, out)}
    orders = {each.order for each in (image, kernel, out)}
    needs(len(kinds) == 1, f"dtypes {kinds}")
    needs(("neither" not in orders and len(orders) == 1) or min(image.dim[1], kernel.dim[1]) == 1, f"formats {orders}")


def convolve(graph: Graph, inputs: dict[str, Any]) -> Any:
    image, kernel, _, window = _operands(graph)
    shape = Shape.of(image.dim[0], tuple(kernel.dim), image.dim[1] // kernel.dim[1], window)
    arrays = [np.ascontiguousarray(each) for each in inputs.values()]
    if graph.name == "conv_fprop":
        return correlate(np, *arrays, None, shape)
    if graph.name == "conv_dgrad":
        return adjoint(np, *arrays, None, shape)[0]
    return adjoint(np, arrays[1], None, arrays[0], shape)[1]


# Attention -----------------------------------------------------------------------------------------------------------


def check_attention(graph: Graph) -> None:
    q, k, v, *rest = graph.inputs.values()
    o, stats = (rest[0], rest[2]) if rest else graph.made
    check_heads(q, k, v, o, stats, 128 if rest else 256)
    if rest:
        check_heads(*graph.made, rest[1], stats, 128)
    else:
        assert graph.options["generate_stats"]
    assert type(graph.options["attn_scale"]) is float


def check_heads(q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, widest: int) -> None:
    for each in (q, k, v, o):
        assert len(each.dim) == 4
        needs(each.kind in (data_type.HALF, data_type.BFLOAT16), "attention takes 16 bits")
        needs(each.stride[3] == 1, "the stride for the last dimension should be 1")
        needs(each.dim[3] % 8 == 0 and each.dim[3] <= widest, f"hidden_dim {each.dim[3]}")
        needs(all(s % 8 == 0 for s, n in zip(each.stride[:3], each.dim, strict=False) if n > 1), "alignment")
    (b, h, length, d) = q.dim
    keys = k.dim[2]
    assert k.dim == [b, k.dim[1], keys, d]
    assert v.dim == [b, k.dim[1], keys, v.dim[3]]
    assert o.dim == [b, h, length, v.dim[3]]
    assert stats.dim == [b, h, length, 1]
    assert stats.kind is data_type.FLOAT
    needs(h % k.dim[1] == 0, "heads")


def attend(graph: Graph, inputs: dict[str, Any], addresses: dict[int, int]) -> list[Any]:
    q, k, v, *rest = inputs.values()
    groups = q.shape[1] // k.shape[1]
    scale = graph.options["attn_scale"]
    k, v = (np.repeat(x, groups, 1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * scale
    if "diagonal_alignment" in graph.options:
        assert graph.options["diagonal_alignment"] is diagonal_alignment.TOP_LEFT
        rows, columns = np.ogrid[: scores.shape[2], : scores.shape[3]]
        scores = np.where(columns <= rows + graph.options["diagonal_band_right_bound"], scores, -np.inf)
    keep = np.ones(())
    if "dropout" in graph.options:
        p, *key = graph.options["dropout"]
        numbers = [abs(int(each.at(addresses).reshape(-1)[0])) for each in key]
        keep = (np.random.default_rng(numbers).random(scores.shape) >= p) / (1 - p)
    if not rest:
        top = scores.max(3, keepdims=True)
        sums = np.exp(scores - top).sum(3, keepdims=True)
        return [(np.exp(scores - top) / sums * keep) @ v, np.log(sums) + top]
    o, g, stats = rest
    probs = np.exp(scores - stats)
    slopes = probs * (g @ v.swapaxes(2, 3) * keep - (g * o).sum(3, keepdims=True)) * scale
    dq = slopes @ k
    dk = slopes.swapaxes(2, 3) @ q
    dv = (probs * keep).swapaxes(2, 3) @ g
    dk, dv = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    return [dq, dk, dv]


class Fake(ModuleType):
    """The module `cudnn`. ran: the operations of every graph that was launched; indices: of timed plans

    lacks: says of an operation whether the library has no engine for it; plans: how many every graph has
    """

    plans = 3

    data_type, heur_mode, build_plan_policy = data_type, heur_mode, build_plan_policy
    numerical_note, diagonal_alignment = numerical_note, diagonal_alignment
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # its name

    def __init__(self, put: Callable[[int, str, Callable[[], None]], None]) -> None:
        super().__init__("cudnn")
        self.put = put
        self.streams: dict[int, int] = {}
        self.graphs: list[Graph] = []
        self.ran: list[str] = []
        self.indices: list[int] = []
        self.lacks: Callable[[str], bool] = lambda operation: False

    def backend_version(self) -> int:
        return 92800

    def create_handle(self) -> int:
        self.streams[1000 + len(self.streams)] = 0
        return 999 + len(self.streams)

    def set_stream(self, handle: int, stream: int) -> None:
        assert handle in self.streams
        self.streams[handle] = stream

    def pygraph(self, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: Any) -> Graph:
        self.graphs.append(Graph(self, io_data_type, intermediate_data_type, compute_data_type, handle))
        return self.graphs[-1]


def absent(gpu: Any, monkeypatch: Any) -> None:
    """No cuDNN, though one may be installed: the real one would read the stand-in's addresses."""
    monkeypatch.setattr(cudnn_graph, "_loaded", ["absent"])
    monkeypatch.setattr(cudnn_graph, "_warn_without_cudnn", lambda reason: None)


def install(gpu: Any, monkeypatch: Any) -> Fake:
    """Gives the stand-in of CuPy a cuDNN, and returns it. Without this, tests run the array formulas."""
    fake = Fake(gpu.launch)
    for name, value in (("_loaded", [fake]), ("_thread", cudnn_graph._ThreadLibraries())):
        monkeypatch.setattr(cudnn_graph, name, value)
    cudnn_graph.log_once.cache_clear()
    monkeypatch.setattr(cudnn_graph, "settings", cudnn_graph.Settings())
    return fake
