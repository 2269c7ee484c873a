"""cuDNN without a GPU: a module `cudnn` with the interface of nvidia-cudnn-frontend 1.26, as far as ours uses it.

A graph checks what the real one checks when it is validated (ranks, strides, sizes, dtypes, what cuDNN's attention and
convolutions take), insists on the order of calls, and computes with NumPy on the stream of its handle, on nothing but
the addresses that it is given. What cuDNN lacks raises its `cudnnGraphNotSupportedError`, as there.

Which graphs the real library accepts was tried on its wheel (9.28, frontend 1.26) on a machine without a GPU, by the
properties of an H200: it built plans for all convolutions of the tests' kinds, with the bias fused in, and
supports all kinds of attention, but not the backward of heads wider than 128.
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

data_type = enum.Enum("data_type", "NOT_SET HALF BFLOAT16 FLOAT DOUBLE INT32 INT64")
heur_mode = enum.Enum("heur_mode", "A B FALLBACK")
build_plan_policy = enum.Enum("build_plan_policy", "HEURISTICS_CHOICE ALL")
numerical_note = enum.Enum("numerical_note", "TENSOR_CORE DOWN_CONVERT_INPUTS NONDETERMINISTIC")
diagonal_alignment = enum.Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
DTYPES = {
    data_type.HALF: np.dtype("f2"),
    data_type.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    data_type.FLOAT: np.dtype("f4"),
    data_type.DOUBLE: np.dtype("f8"),
    data_type.INT64: np.dtype("i8"),
}
WORKSPACE = 512
ALIGNMENT = 16  # bytes
Put = Callable[[int, str, Callable[[], None]], None]


class cudnnGraphNotSupportedError(RuntimeError):  # its name
    """What the library has no engine for."""


def needs(condition: bool, text: str) -> None:
    if not condition:
        raise cudnnGraphNotSupportedError(text)


class Tensor:
    """A tensor of a graph."""

    def __init__(self, dim: Sequence[int] = (), stride: Sequence[int] = (), kind: Any = None, uid: int = -1) -> None:
        self.dim, self.stride, self.kind, self.uid = list(dim), list(stride), kind, uid
        self.virtual = True

    def set_output(self, value: bool) -> Tensor:
        self.virtual = not value
        return self

    def set_data_type(self, kind: Any) -> Tensor:
        assert kind in DTYPES
        self.kind = kind
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        assert type(dim) is list
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        assert type(stride) is list
        self.stride = stride
        return self

    def get_uid(self) -> int:
        return self.uid

    @property
    def order(self) -> str:
        """In which order the axes lie, if there are no gaps: first, last (channels), or neither."""
        axes = range(len(self.dim))
        for name, order in (("first", [*axes]), ("last", [0, *axes[2:], 1])):
            step, fits = 1, True
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


Run = Callable[[dict[int, int], dict[int, Any]], None]


class Graph:
    """`cudnn.pygraph`: calls must come in the library's order."""

    STEPS = ("made", "validated", "built", "planned", "supported", "ready")

    def __init__(self, fake: Fake, io: Any, intermediate: Any, compute: Any, handle: Any) -> None:
        assert io in DTYPES
        assert intermediate is compute
        assert compute in (data_type.FLOAT, data_type.DOUBLE)
        assert handle in fake.streams
        self.fake, self.io = fake, io
        self.tensors: list[Tensor] = []
        self.checks: list[Callable[[], None]] = []
        self.runs: list[Run] = []
        self.name = ""
        self.unwanted: set[Any] = set()
        self.step = "made"

    def tensor(self, dim: list[int], stride: list[int], data_type: Any, uid: int) -> Tensor:
        assert type(dim) is list
        assert type(stride) is list
        assert len(dim) == len(stride)
        assert all(type(n) is int for n in (*dim, *stride))
        assert min(dim) > 0
        made = Tensor(dim, stride, data_type, uid)
        made.virtual = False
        self.tensors.append(made)
        return made

    def _made(self) -> Tensor:
        self.tensors.append(Tensor(kind=self.io))
        return self.tensors[-1]

    def _values(self, tensor: Tensor, addresses: dict[int, int], found: dict[int, Any]) -> Any:
        return found[id(tensor)] if tensor.virtual else tensor.at(addresses).astype(self.fake.wide)

    def _give(self, tensor: Tensor, value: Any, addresses: dict[int, int], found: dict[int, Any]) -> None:
        if tensor.virtual:
            found[id(tensor)] = value
        else:
            tensor.at(addresses)[...] = value.astype(DTYPES[tensor.kind])

    # Convolutions -----------------------------------------------------------------------------------------------------

    def conv_fprop(
        self, image: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        out = self._made()
        self.name += "conv_fprop "
        steps = padding, stride, dilation

        def check() -> None:
            out.dim = out.dim or conv_size(image, weight, *steps)
            out.stride = out.stride or [1] * len(out.dim)
            check_conv(image, weight, out, *steps)

        def run(addresses: dict[int, int], found: dict[int, Any]) -> None:
            x, w = (self._values(t, addresses, found) for t in (image, weight))
            self._give(out, correlate(x, w, conv_size(image, weight, *steps), *steps), addresses, found)

        self.checks.append(check)
        self.runs.append(run)
        return out

    def conv_dgrad(
        self, loss: Tensor, filter: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        out = self._made()
        self.name += "conv_dgrad "
        steps = padding, stride, dilation

        def run(addresses: dict[int, int], found: dict[int, Any]) -> None:
            g, w = (self._values(t, addresses, found) for t in (loss, filter))
            self._give(out, spread(g, w, out.dim, *steps), addresses, found)

        self.checks.append(lambda: check_conv(out, filter, loss, *steps))
        self.runs.append(run)
        return out

    def conv_wgrad(
        self, image: Tensor, loss: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        out = self._made()
        self.name += "conv_wgrad "
        steps = padding, stride, dilation

        def run(addresses: dict[int, int], found: dict[int, Any]) -> None:
            x, g = (self._values(t, addresses, found) for t in (image, loss))
            self._give(out, filters(x, g, out.dim, *steps), addresses, found)

        self.checks.append(lambda: check_conv(image, out, loss, *steps))
        self.runs.append(run)
        return out

    def bias(self, input: Tensor, bias: Tensor) -> Tensor:
        out = self._made()
        self.name += "bias "
        needs(not self.fake.lacks("bias"), "no fused bias")

        def check() -> None:
            assert bias.dim == [1, out.dim[1], *[1] * (len(out.dim) - 2)]

        def run(addresses: dict[int, int], found: dict[int, Any]) -> None:
            x, b = (self._values(t, addresses, found) for t in (input, bias))
            self._give(out, x + b, addresses, found)

        self.checks.append(check)
        self.runs.append(run)
        return out

    # Attention --------------------------------------------------------------------------------------------------------

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_scale: float,
        generate_stats: bool,
        diagonal_alignment: Any = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[float, Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        assert generate_stats
        assert type(attn_scale) is float
        o, stats = self._made(), self._made()
        self.name += "sdpa "

        def check() -> None:
            check_heads(q, k, v, o, stats, widest=256)

        def run(addresses: dict[int, int], found: dict[int, Any]) -> None:
            qs, ks, vs = (self._values(t, addresses, found) for t in (q, k, v))
            ks, vs = (np.repeat(x, qs.shape[1] // x.shape[1], 1) for x in (ks, vs))
            scores = seen(qs @ ks.swapaxes(2, 3) * attn_scale, diagonal_band_right_bound)
            top = scores.max(3, keepdims=True)
            sums = np.exp(scores - top).sum(3, keepdims=True)
            self._give(stats, np.log(sums) + top, addresses, found)
            probs = np.exp(scores - top) / sums * kept(dropout, addresses, scores.shape)
            self._give(o, probs @ vs, addresses, found)

        self.checks.append(check)
        self.runs.append(run)
        return [o, stats]

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,  # the library's name
        stats: Tensor,
        attn_scale: float,
        use_deterministic_algorithm: bool,
        diagonal_alignment: Any = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[float, Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        found = [self._made() for _ in range(3)]
        self.name += "sdpa_backward "

        def check() -> None:
            check_heads(q, k, v, o, stats, widest=128)
            check_heads(*found, dO, stats, widest=128)

        def run(addresses: dict[int, int], values: dict[int, Any]) -> None:
            qs, ks, vs, os, gs, logs = (self._values(t, addresses, values) for t in (q, k, v, o, dO, stats))
            groups = qs.shape[1] // ks.shape[1]
            ks, vs = (np.repeat(x, groups, 1) for x in (ks, vs))
            scores = seen(qs @ ks.swapaxes(2, 3) * attn_scale, diagonal_band_right_bound)
            probs, keep = np.exp(scores - logs), kept(dropout, addresses, scores.shape)
            slopes = probs * (gs @ vs.swapaxes(2, 3) * keep - (gs * os).sum(3, keepdims=True)) * attn_scale
            results = slopes @ ks, slopes.swapaxes(2, 3) @ qs, (probs * keep).swapaxes(2, 3) @ gs
            for tensor, value in zip(found, results, strict=True):
                if value.shape[1] != tensor.dim[1]:
                    value = value.reshape(value.shape[0], tensor.dim[1], groups, *value.shape[2:]).sum(2)
                self._give(tensor, value, addresses, values)

        self.checks.append(check)
        self.runs.append(run)
        return found

    # From a graph to a plan -------------------------------------------------------------------------------------------

    def _to(self, step: str) -> None:
        assert self.STEPS.index(step) == self.STEPS.index(self.step) + 1, f"{step} after {self.step}"
        self.step = step

    def validate(self) -> None:
        self._to("validated")
        for check in self.checks:
            check()
        uids = [each.uid for each in self.tensors if not each.virtual]
        assert len(set(uids)) == len(uids)
        assert min(uids) > 0
        needs(not self.fake.lacks(self.name.split()[0]), f"no {self.name}")

    def build_operation_graph(self) -> None:
        self._to("built")

    def create_execution_plans(self, modes: list[Any]) -> None:
        assert modes
        assert all(isinstance(each, heur_mode) for each in modes)
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
        return 3

    def build_plan_at_index(self, index: int) -> None:
        assert self.step in ("supported", "ready")
        needs(index != 1, "this one cannot be built")
        self.step = "ready"

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.get_workspace_size()

    def execute(self, pack: dict[int, int], workspace: int, handle: Any) -> None:
        assert self.step == "ready"
        assert (workspace != 0) == (self.get_workspace_size() > 0)
        wanted = {each.uid for each in self.tensors if not each.virtual}
        assert set(pack) == wanted, (pack, wanted)
        assert all(type(each) is int and each for each in pack.values())
        # What the front end declares of every tensor; plans are chosen for it, and loads of several elements trap.
        odd = [t.uid for t in self.tensors if not t.virtual and math.prod(t.dim) > 1 and pack[t.uid] % ALIGNMENT]
        assert not odd, f"tensors {odd} are not aligned to {ALIGNMENT} bytes"
        assert workspace % ALIGNMENT == 0
        addresses, runs = dict(pack), list(self.runs)

        def work() -> None:
            if workspace:
                (ctypes.c_char * WORKSPACE).from_address(workspace)[:] = b"\xff" * WORKSPACE
            found: dict[int, Any] = {}
            with np.errstate(all="ignore"):
                for run in runs:
                    run(addresses, found)

        self.fake.ran.append(self.name.strip())
        self.fake.put(self.fake.streams[handle], "cudnn " + self.name.strip(), work)

    def execute_plan_at_index(self, pack: dict[int, int], workspace: int, index: int, handle: Any) -> None:
        self.fake.indices.append(index)
        self.execute(pack, workspace, handle)


def conv_size(image: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int]) -> list[int]:
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, p, s, d in zip(image.dim[2:], weight.dim[2:], padding, stride, dilation, strict=True)
    ]
    return [image.dim[0], weight.dim[0], *sizes]


def check_conv(
    image: Tensor, weight: Tensor, out: Tensor, padding: list[int], stride: list[int], dilation: list[int]
) -> None:
    assert len(image.dim) == len(weight.dim) == len(out.dim)
    assert len(padding) == len(stride) == len(dilation) == len(image.dim) - 2
    assert image.dim[1] % weight.dim[1] == 0
    assert weight.dim[0] % (image.dim[1] // weight.dim[1]) == 0
    wanted = conv_size(image, weight, padding, stride, dilation)
    assert out.dim[:2] == wanted[:2]
    needs(out.dim == wanted, f"sizes {out.dim}, not {wanted}")
    kinds = {image.kind, weight.kind, out.kind}
    needs(len(kinds) == 1, f"dtypes {kinds}")
    orders = {each.order for each in (image, weight) if not each.virtual}
    needs(("neither" not in orders and len(orders) <= 1) or min(image.dim[1], weight.dim[1]) == 1, f"formats {orders}")


def check_heads(q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, widest: int) -> None:
    for each in (q, k, v, o, stats):
        assert len(each.dim) == len(each.stride) == 4
    for each in (q, k, v, o):
        needs(each.kind in (data_type.HALF, data_type.BFLOAT16), "attention takes 16 bits")
        needs(each.stride[3] == 1, "the stride for the last dimension should be 1")
        needs(each.dim[3] % 8 == 0 and each.dim[3] <= widest, f"hidden_dim {each.dim[3]}")
        needs(all(s % 8 == 0 for s, n in zip(each.stride[:3], each.dim, strict=False) if n > 1), "alignment")
    (b, h, length, d), keys = q.dim, k.dim[2]
    assert k.dim == [b, k.dim[1], keys, d]
    assert v.dim == [b, k.dim[1], keys, v.dim[3]]
    assert o.dim == [b, h, length, v.dim[3]]
    assert stats.dim == [b, h, length, 1]
    assert stats.kind is data_type.FLOAT
    needs(h % k.dim[1] == 0, "heads")


def seen(scores: Any, right: int | None) -> Any:
    if right is None:
        return scores
    rows, columns = np.ogrid[: scores.shape[2], : scores.shape[3]]
    return np.where(columns <= rows + right, scores, -np.inf)


def kept(dropout: tuple[float, Tensor, Tensor] | None, addresses: dict[int, int], shape: tuple[int, ...]) -> Any:
    if dropout is None:
        return 1.0
    p, seed, offset = dropout
    numbers = [int(each.at(addresses).reshape(-1)[0]) for each in (seed, offset)]
    return (np.random.default_rng(numbers).random(shape) >= p) / (1 - p)


def _shifts(framed: Any, size: Sequence[int], kernel: Sequence[int], stride: list[int], dilation: list[int]) -> Any:
    """Each element of the kernel, and what of the framed image it sees."""
    for at in np.ndindex(*kernel):
        cut = [slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, n, s in zip(at, dilation, size, stride, strict=True)]
        yield at, framed[(slice(None), slice(None), *cut)]


def _framed(x: Any, padding: list[int]) -> Any:
    return np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])


def correlate(x: Any, w: Any, size: Sequence[int], padding: list[int], stride: list[int], dilation: list[int]) -> Any:
    n, c, groups = x.shape[0], w.shape[1], x.shape[1] // w.shape[1]
    out = np.zeros((n, groups, w.shape[0] // groups, math.prod(size[2:])), x.dtype)
    kernel = w.reshape(groups, -1, *w.shape[1:])
    for at, part in _shifts(_framed(x, padding), size[2:], w.shape[2:], stride, dilation):
        out += np.einsum("goc,ngcp->ngop", kernel[(slice(None),) * 3 + at], part.reshape(n, groups, c, -1))
    return out.reshape(size)


def filters(x: Any, g: Any, shape: Sequence[int], padding: list[int], stride: list[int], dilation: list[int]) -> Any:
    n, c, groups = x.shape[0], shape[1], x.shape[1] // shape[1]
    out = np.zeros((groups, shape[0] // groups, *shape[1:]), x.dtype)
    slopes = g.reshape(n, groups, shape[0] // groups, -1)
    for at, part in _shifts(_framed(x, padding), g.shape[2:], shape[2:], stride, dilation):
        out[(slice(None),) * 3 + at] = np.einsum("ngop,ngcp->goc", slopes, part.reshape(n, groups, c, -1))
    return out.reshape(shape)


def spread(g: Any, w: Any, shape: Sequence[int], padding: list[int], stride: list[int], dilation: list[int]) -> Any:
    n, groups = g.shape[0], shape[1] // w.shape[1]
    framed = _framed(np.zeros(shape, g.dtype), padding)
    kernel, slopes = w.reshape(groups, -1, *w.shape[1:]), g.reshape(n, groups, w.shape[0] // groups, -1)
    for at, part in _shifts(framed, g.shape[2:], w.shape[2:], stride, dilation):
        part += np.einsum("goc,ngop->ngcp", kernel[(slice(None),) * 3 + at], slopes).reshape(part.shape)
    inside = [slice(p, p + m) for p, m in zip(padding, shape[2:], strict=True)]
    return framed[(slice(None), slice(None), *inside)]


class Fake(ModuleType):
    """The module `cudnn`. ran: the operations of every graph that was launched; indices: of timed plans

    lacks: says of an operation whether the library has no engine for it
    """

    data_type, heur_mode, build_plan_policy = data_type, heur_mode, build_plan_policy
    numerical_note, diagonal_alignment = numerical_note, diagonal_alignment
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # its name
    __version__ = "1.26.0"
    wide = np.float32

    def __init__(self, put: Put) -> None:
        super().__init__("cudnn")
        self.put = put
        self.streams: dict[int, int] = {}
        self.told = 0  # times that a handle was told its stream
        self.graphs: list[Graph] = []
        self.ran: list[str] = []
        self.indices: list[int] = []
        self.lacks: Callable[[str], bool] = lambda operation: False

    def backend_version(self) -> int:
        return 92800

    def create_handle(self) -> int:
        handle = 1000 + len(self.streams)
        self.streams[handle] = 0
        return handle

    def destroy_handle(self, handle: int) -> None:
        del self.streams[handle]

    def set_stream(self, handle: int, stream: int) -> None:
        assert handle in self.streams
        self.streams[handle] = stream
        self.told += 1

    def pygraph(self, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: Any) -> Graph:
        self.graphs.append(Graph(self, io_data_type, intermediate_data_type, compute_data_type, handle))
        return self.graphs[-1]


def absent(gpu: Any, monkeypatch: Any) -> None:
    """No cuDNN, though one may be installed: the real one would read the stand-in's addresses."""
    from ddp._cuda import cudnn_graph

    monkeypatch.setattr(cudnn_graph, "_loaded", ["absent"])
    monkeypatch.setattr(cudnn_graph, "_said", {"absent"})


def install(gpu: Any, monkeypatch: Any) -> Fake:
    """Gives the stand-in of CuPy a cuDNN, and returns it. Without this, tests run our own kernels."""
    from ddp._cuda import cudnn_graph

    def put(stream: int, kind: str, work: Callable[[], None]) -> None:
        gpu.cupy.record.launches[kind] += 1
        gpu.put(stream, kind, work)

    fake = Fake(put)
    monkeypatch.setattr(cudnn_graph, "_loaded", [fake])
    monkeypatch.setattr(cudnn_graph, "_mine", cudnn_graph._Mine())
    monkeypatch.setattr(cudnn_graph, "_said", set())
    monkeypatch.setattr(cudnn_graph, "settings", cudnn_graph.Settings())
    return fake
