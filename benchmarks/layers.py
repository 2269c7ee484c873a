"""Layers and activations beside PyTorch's: forward, and forward with backward, on one core and the same arrays.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/layers.py [--rounds 20] [--only "gelu"] [--json FILE]

Times are CPU time, which neighbours on the machine disturb less than the clock. Goal: forward and backward at most 1.0
times PyTorch's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import ddp  # noqa: E402
from benchmarks import harness  # noqa: E402

GOAL = 1.0
LIBRARIES = {"ours": ddp, "torch": torch}
ACTIVATIONS = ("gelu", "silu", "softplus", "tanh", "sigmoid", "relu", "leaky_relu", "elu", "mish", "hardswish")
NORMALISATIONS: list[tuple[str, tuple[Any, ...], tuple[int, ...]]] = [
    ("LayerNorm", (128,), (2048, 128)),
    ("LayerNorm", (1024,), (2048, 1024)),
    ("RMSNorm", (128,), (2048, 128)),
    ("BatchNorm1d", (1024,), (128, 1024)),
    ("BatchNorm2d", (32,), (64, 32, 26, 26)),
    ("GroupNorm", (8, 32), (64, 32, 14, 14)),
]
ATTENTIONS = ((16, 4, 128, 32, True), (2, 8, 1024, 64, True), (2, 8, 1024, 64, False))  # …, causal
Array = np.ndarray[Any, Any]
Forward = Callable[[], Any]
Pair = dict[str, tuple[Any, Forward]]  # library → inputs that want gradients, and the forward


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def function(
    call: Callable[[Any, Any], Any], *arrays: Array, transpose: bool = False
) -> dict[str, tuple[Any, Forward]]:
    """A function of tensors. transpose: their second and third axis are exchanged, as a model's heads are."""
    found = {}
    for name, t in LIBRARIES.items():
        tensors = [t.from_numpy(array.copy()) for array in arrays]
        leaves = [(x.transpose(1, 2) if transpose else x).requires_grad_() for x in tensors]
        found[name] = (leaves, lambda t=t, leaves=leaves: call(t, leaves))
    return found


def layer(make: Callable[[Any], Any], array: Array) -> Pair:
    """A layer with the same weights in both libraries."""
    theirs, ours = make(torch.nn), make(ddp.nn)
    ours.load_state_dict({key: value.detach().numpy() for key, value in theirs.state_dict().items()})
    found = {}
    for name, module in (("ours", ours), ("torch", theirs)):
        x = LIBRARIES[name].from_numpy(array.copy())
        if array.dtype.kind == "f":
            x.requires_grad_()
        leaves = [*([x] if array.dtype.kind == "f" else []), *module.parameters()]
        found[name] = (leaves, lambda module=module, x=x: module(x))
    return found


def cases() -> Iterator[tuple[str, Pair]]:
    for size, count in (("2 MiB", 1 << 19), ("16 MiB", 1 << 22)):
        for name in ACTIVATIONS:
            yield f"{name} {size}", function(lambda t, x, name=name: getattr(t.nn.functional, name)(*x), numbers(count))
        tanh = function(lambda t, x: t.nn.functional.gelu(*x, approximate="tanh"), numbers(count))
        yield f"gelu tanh {size}", tanh
    for name, args, shape in NORMALISATIONS:
        yield f"{name} {shape}", layer(lambda nn, name=name, args=args: getattr(nn, name)(*args), numbers(*shape))
    for batch, heads, length, depth, causal in ATTENTIONS:
        for inside in (False, True):
            shape = (batch, length, heads, depth) if inside else (batch, heads, length, depth)
            label = (
                f"attention {(batch, heads, length, depth)} {'causal' if causal else 'full'}{', heads inside' * inside}"
            )

            def attend(t: Any, x: Any, causal: bool = causal) -> Any:
                return t.nn.functional.scaled_dot_product_attention(*x, is_causal=causal)

            yield label, function(attend, *(numbers(*shape, seed=i) for i in range(3)), transpose=inside)
    for rows in (1000, 50000):
        index = np.random.default_rng(0).integers(0, rows, 2048)
        yield f"embedding {rows} x 128, 2048 looked up", layer(lambda nn, rows=rows: nn.Embedding(rows, 128), index)
    for kind in ("RNN", "GRU", "LSTM"):
        for steps, batch, into, hidden in ((50, 32, 64, 128), (100, 16, 256, 256)):
            made = layer(lambda nn, kind=kind, n=into, m=hidden: getattr(nn, kind)(n, m), numbers(steps, batch, into))
            yield f"{kind} {(steps, batch, into, hidden)}", made


def calls(case: Pair) -> dict[str, dict[str, Callable[[], float]]]:
    """forward, both → library → CPU seconds of one."""
    found: dict[str, dict[str, Callable[[], float]]] = {"forward": {}, "both": {}}
    for name, (leaves, forward) in case.items():
        t = LIBRARIES[name]

        def output(forward: Forward = forward) -> Any:
            y = forward()
            return y[0] if isinstance(y, tuple) else y

        g = t.from_numpy(numbers(*output().shape, seed=9))

        def both(t: Any = t, leaves: Any = leaves, output: Forward = output, g: Any = g) -> None:
            t.autograd.grad(output(), leaves, g)

        found["forward"][name] = lambda output=output: harness.seconds(output, clock=time.process_time)
        found["both"][name] = lambda both=both: harness.seconds(both, clock=time.process_time)
    return found


def main() -> None:
    parser = harness.parser(__doc__, rounds=20, json_file="layers.json")
    parser.add_argument("--only", default="", help="only cases whose names begin so")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    columns = [f"{part} {who}" for part in ("f", "f+b") for who in ("ours", "torch", "ratio")]
    print(f"{'ms; ratio: ours / PyTorch':<52}" + "".join(f"{column:>11}" for column in columns))
    for label, case in cases():
        if not label.startswith(args.only):
            continue
        row = rows[label] = {}
        for part, pair in calls(case).items():
            rounds = harness.take_turns(pair, args.rounds)
            row |= {f"{part} {who} ms": 1e3 * value for who, value in harness.medians(rounds).items()}
            row[f"{part} ratio"] = harness.over(rounds["ours"], rounds["torch"])
        print(f"{label:<52}" + "".join(f"{value:>11.2f}" for value in row.values()), flush=True)
    harness.show_goals([harness.at_most(label, GOAL, row["both ratio"]) for label, row in rows.items()])
    harness.write(args.json, "layers", rounds=args.rounds, medians=rows)


if __name__ == "__main__":
    main()
