"""What the steps of the first minutes on a GPU do; each runs in a process of its own, which `first.py` starts.

    python -m benchmarks.gpu.first_steps kernels cuda

A step prints what it has found, and fails by raising. All take the device first: what a CPU can run runs there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

import ddp
from benchmarks import harness
from benchmarks.gpu.first import NOTHING_CAN_RUN, WARNING
from benchmarks.gpu.tasks import TASKS
from benchmarks.gpu.worker import Library, Worker, first_losses, train
from ddp.nn import functional as F
from ddp.ops.arrays import BFLOAT16
from launcher.doctor import checkup, findings, gpu, mpi

CUPY = 14  # the oldest that is supported
CUDNN = 91_000
COMPARED = 3  # losses: later ones differ as rounding grows
LOSS_TOLERANCE = 0.02  # relative: a GPU rounds to bfloat16 at other places
# Relative to the largest number of a result.
TOLERANCES = {ddp.float32: 2e-3, ddp.bfloat16: 3e-2, ddp.float16: 1e-2}
Case = tuple[Callable[..., Any], Sequence[tuple[int, ...]]]  # a function, and the shapes of the tensors that it takes
Compute = Callable[[Any, Sequence[Any], Any], list[Any]]  # of a result, the inputs and the result's gradient


def versions(device: str, path: str) -> None:
    """What is installed and works, as ddp-doctor finds it. What is missing is a warning. path: a JSON file for it

    Raises: SystemExit with `NOTHING_CAN_RUN` if there is no GPU that can be used: the last line says why;
        AssertionError if CuPy or cuDNN is too old.
    """
    checks = [*checkup.run("mpi", mpi.check), *checkup.run("gpu", gpu.check)]
    print(*findings.lines(checks, colour=False), sep="\n")
    for finding in checks:
        sentence = f"{finding.text}: {finding.fix}".rstrip(": ")
        if finding.level in ("warning", "error"):
            print(f"{WARNING}{sentence}")
    facts = gpu.probe()
    cudnn = Library("ddp", device).cudnn()
    harness.write(Path(path), "first", gpu=facts.cards, cupy=facts.cupy, nccl=facts.nccl, cudnn=cudnn)
    if device == "cuda":
        if facts.cupy is None or facts.cupy.value is None:
            print(sentence)  # the last one: of the GPU
            sys.exit(NOTHING_CAN_RUN)
        assert int(facts.cupy.value["version"].split(".")[0]) >= CUPY, f"CuPy is older than {CUPY}"
        assert cudnn is None or cudnn >= CUDNN, f"cuDNN {cudnn} is older than {CUDNN}"


def compile(device: str) -> None:
    """Compiles every source of ours in all its dtypes, several at a time. Later steps find them in CuPy's cache."""
    import cupy

    from ddp._cuda import raw_kernel

    def load(source: raw_kernel.KernelSource, name: str) -> None:
        dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
        entry = source.code.split('extern "C" __global__ void ')[1].split("(")[0]
        raw_kernel.compile_kernel(cupy, source.text(dtype), entry, source.options)

    ddp.ones(1, device=device)  # makes the context, and imports all kernels
    jobs = [(source, name) for source in raw_kernel.KERNEL_SOURCES.values() for name in source.dtypes]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(load, *zip(*jobs, strict=True)))  # raises what one of them raised
    print(f"{len(jobs)} sources compiled")


def cases() -> dict[str, Case]:
    """Ops that have kernels or library calls of their own, and what they are called with."""
    index = ddp.from_numpy(np.arange(48) % 40)
    rows = (48, 40)
    row = (40,)
    layer = [rows, (24, 40), (24,)]
    heads = [(2, 4, 16, 64)] * 3
    return {
        "layer_norm": (lambda x, w, b: F.layer_norm(x, row, w, b), [rows, row, row]),
        "rms_norm": (lambda x, w: F.rms_norm(x, row, w), [rows, row]),
        "embedding": (lambda w: F.embedding(index.to(w.device), w), [rows]),
        "cross_entropy": (lambda x: F.cross_entropy(x, index.to(x.device)), [rows]),
        "linear": (F.linear, layer),
        "linear and relu": (lambda x, w, b: F.linear_act(x, w, b, "relu"), layer),
        "linear and gelu": (lambda x, w, b: F.linear_act(x, w, b, "gelu", approximate="tanh"), layer),
        "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads),
        "attention, 5 wide": (F.scaled_dot_product_attention, [(2, 4, 16, 5)] * 3),  # cuDNN has none
        "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 8, 8, 8), (16, 8, 3, 3), (16,)]),
        "tril": (lambda x: x.tril(), [rows]),
        "0-d": (lambda x: x.sum() * 0.5 + 1, [row]),
        "softmax": (lambda x: x.softmax(1), [rows]),
    }


def kernels(device: str) -> None:
    """Every case in three dtypes: result and gradients against those of the CPU in float32."""
    compare(device, first_order, TOLERANCES)


def derivatives(device: str) -> None:
    """Every case in float32: gradients with a graph, and their gradients, against those of the CPU."""
    compare(device, second_order, {ddp.float32: 5 * TOLERANCES[ddp.float32]})


def first_order(out: Any, inputs: Sequence[Any], g: Any) -> list[Any]:
    out.backward(g)
    return [out, *(x.grad for x in inputs)]


def second_order(out: Any, inputs: Sequence[Any], g: Any) -> list[Any]:
    wanted = [*inputs, g.requires_grad_()]
    gradients = ddp.autograd.grad(out, inputs, g, create_graph=True)
    value = sum(dx.square().sum() for dx in gradients)
    return [*gradients, *ddp.autograd.grad(value, wanted, materialize_grads=True)]


def compare(device: str, compute: Compute, tolerances: Mapping[Any, float]) -> None:
    """What `compute` makes of every case, in some dtypes. Raises: SystemExit if it is another on the device."""
    wrong = []
    for name, case in cases().items():
        for dtype, tolerance in tolerances.items():
            try:
                error = largest_error(case, device, dtype, compute)
                assert error < tolerance, f"{error:.2g} off"
            except Exception as error:
                wrong.append(f"{name}, {dtype}: {type(error).__name__}: {error}")
    print(f"{len(wrong)} differ", *wrong, sep="\n")
    if wrong:
        sys.exit(1)


def largest_error(case: Case, device: str, dtype: Any, compute: Compute) -> float:
    """Of what `compute` makes in a dtype on the device, beside the largest number of the same on the CPU in float32."""
    function, shapes = case
    random = np.random.default_rng(0)
    numbers = [ddp.from_numpy(random.standard_normal(shape)).to(dtype) for shape in shapes]
    results = []
    for computed_on, computed_in in (("cpu", ddp.float32), (device, dtype)):
        inputs = [x.to(computed_on, computed_in).clone().requires_grad_() for x in numbers]
        out = function(*inputs)
        assert out.dtype is computed_in, f"the result is {out.dtype}"
        g = np.random.default_rng(1).standard_normal(out.shape)
        computed = compute(out, inputs, ddp.as_tensor(g).to(computed_on, computed_in))
        results.append([x.detach().cpu().double().numpy() for x in computed])
    pairs = zip(*results, strict=True)
    return max(np.abs(expected - actual).max() / (np.abs(expected).max() or 1) for expected, actual in pairs)


def tiny(device: str, model: str, implementation: str) -> None:
    """Trains a tiny model: losses must fall, and the first be those of the CPU. implementation: ddp or ddp-graph"""
    task = TASKS[model].small()
    losses = first_losses(train(Library(implementation, device), task))
    expected = first_losses(train(Library("ddp", "cpu"), task))
    print(f"losses {losses}, on the CPU {expected}")
    assert_allclose(losses[:COMPARED], expected[:COMPARED], LOSS_TOLERANCE)
    assert losses[-1] < losses[0], "the loss does not fall"


def full(device: str, model: str, implementation: str) -> None:
    """Trains a model of the benchmark's size (on a CPU: a tiny one), whose losses must fall, and times its steps."""
    worker = Worker(model, implementation, device)
    first = worker.warm_up()
    print(f"{first}\n{1e3 * worker.steps(10):.2f} ms a step")
    assert first["losses"][-1] < first["losses"][0], "the loss does not fall"


def memcheck(device: str) -> None:
    """A tiny training in which each array is an allocation of CUDA's: in blocks of a pool the tool sees no bounds."""
    ddp.cuda.memory.use("async")
    tiny(device, "small-gpt", "ddp")


if __name__ == "__main__":
    steps = (versions, compile, kernels, derivatives, tiny, full, memcheck)
    {step.__name__: step for step in steps}[sys.argv[1]](*sys.argv[2:])
