"""Your own CUDA kernels in your own op: one computes x * sigmoid(beta * x), another its backward.

    python examples/cuda_kernel.py

This needs a GPU, and CuPy, which compiles a kernel when it is first launched. Written with three ops of `ddp`, the same
function reads and writes arrays of the size of x in each of them; here x is read once, and the result is written once.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from typing import Any

import numpy as np

import ddp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.nn import functional as F

# A grid-stride loop: the result is right for any number of blocks.
SOURCE = """
typedef long long Index;

#define FOR_EACH(i, n) \\
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (Index)gridDim.x * blockDim.x)

// s = sigmoid(beta x):  y = x s
extern "C" __global__ void swish(const T* x, T* y, double beta, Index n) {
    const T b = T(beta);
    FOR_EACH(i, n) y[i] = x[i] / (T(1) + exp(-b * x[i]));
}

// dx = g (s + beta x s (1 - s))
extern "C" __global__ void swish_backward(const T* g, const T* x, T* dx, double beta, Index n) {
    const T b = T(beta);
    FOR_EACH(i, n) {
        const T s = T(1) / (T(1) + exp(-b * x[i]));
        dx[i] = g[i] * (s + b * x[i] * s * (T(1) - s));
    }
}
"""
TYPES = {"float32": "float", "float64": "double"}
THREADS, BLOCKS = 256, 4096


def text(dtype: str) -> str:
    """The source for tensors of a dtype. Raises: KeyError if it is neither float32 nor float64."""
    return f"typedef {TYPES[dtype]} T;\n{SOURCE}"


@functools.cache
def kernel(name: str, dtype: str) -> Any:
    """The kernel of that name, which is compiled when it is first launched."""
    import cupy

    return cupy.RawKernel(text(dtype), name)


def launch(name: str, like: ddp.Tensor, *inputs: ddp.Tensor, beta: float) -> ddp.Tensor:
    """Launches a kernel on the inputs, and returns its result, a new tensor of the shape of `like`.

    The launch goes to the current stream, as every op does. Nothing waits, so it can be part of a CUDA graph.
    """
    import cupy

    # CuPy arrays in the same memory. DLPack keeps the order of streams without waiting; cupy.asarray(x) would wait.
    arrays = [cupy.from_dlpack(x.detach().contiguous()) for x in inputs]
    out = cupy.empty(tuple(like.shape), arrays[0].dtype)
    if out.size:
        blocks = min(-(-out.size // THREADS), BLOCKS)
        # Arguments that are not arrays are passed with their NumPy type: here as double and long long.
        kernel(name, out.dtype.name)((blocks,), (THREADS,), (*arrays, out, np.float64(beta), np.int64(out.size)))
    return ddp.from_dlpack(out)


class Swish(ddp.autograd.Function):
    """x: any shape, on a GPU, float32 or float64."""

    @staticmethod
    def forward(ctx: Any, x: ddp.Tensor, beta: float) -> ddp.Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        return launch("swish", x, x, beta=beta)

    @staticmethod
    def backward(ctx: Any, g: ddp.Tensor) -> tuple[ddp.Tensor, None]:
        (x,) = ctx.saved_tensors
        return launch("swish_backward", x, g, x, beta=ctx.beta), None


class Curve(nn.Module):
    """input: any shape."""

    def forward(self, input: ddp.Tensor) -> ddp.Tensor:
        return Swish.apply(input, 1.5)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not ddp.cuda.is_available():
        print("cuda_kernel.py needs a CUDA GPU and CuPy (pip install -e '.[cuda12]'), and does not find both here")
        return 1
    ddp.manual_seed(0)
    x = ddp.randn(7, 5, dtype=ddp.float64, device="cuda", requires_grad=True)
    ddp.autograd.gradcheck(lambda x: Swish.apply(x, 1.5), (x,))
    apart = (x * ddp.sigmoid(1.5 * x) - Swish.apply(x, 1.5)).abs().max().item()
    print(f"gradients agree with finite differences; values agree with ops of ddp up to {apart:.0e}")

    model = nn.Sequential(nn.Linear(1, 32), Curve(), nn.Linear(32, 32), Curve(), nn.Linear(32, 1)).to("cuda")
    optimizer = ddp.optim.Adam(model.parameters(), lr=5e-3)
    x = ddp.linspace(-math.pi, math.pi, 256, device="cuda").reshape(-1, 1)
    with progress_bar(range(args.steps), unit="step") as bar:
        for _ in bar:
            loss = F.mse_loss(model(x), x.sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"a net with this op learns the sine: mean squared error {loss.item():.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
