"""Attention, embedding and recurrent layers beside PyTorch's, forward and forward with backward, on one core.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/sequence_layers.py [--rounds 20] [--only attention] [--json FILE]

Rounds alternate between ours and PyTorch's; times are of the processor, which neighbours on the machine disturb less
than the clock; ratios are medians over rounds. Goal: attention at most 1.0 forward and backward together.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ddp

Pair = dict[str, Callable[[], Any]]  # by whose: what one round runs


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def attention(batch: int, heads: int, length: int, depth: int, causal: bool, inside: bool) -> tuple[Pair, Pair]:
    """inside: heads inside the length, as a model has them after its projection."""
    shape = (batch, length, heads, depth) if inside else (batch, heads, length, depth)
    arrays = [numbers(*shape, seed=i) for i in range(4)]
    forward: Pair = {}
    both: Pair = {}
    for name, t, wrap in (("ours", ddp, ddp.from_numpy), ("torch", torch, torch.from_numpy)):
        *xs, g = [wrap(a).transpose(1, 2) if inside else wrap(a) for a in arrays]
        xs = [x.requires_grad_() for x in xs]

        def run(t: Any = t, xs: Any = xs) -> Any:
            return t.nn.functional.scaled_dot_product_attention(*xs, is_causal=causal)

        def run_both(t: Any = t, xs: Any = xs, g: Any = g, run: Any = run) -> Any:
            return t.autograd.grad(run(), xs, g)

        forward[name], both[name] = run, run_both
    return forward, both


def layer(make: Callable[[Any], Any], inputs: list[np.ndarray[Any, Any]], out: tuple[int, ...]) -> tuple[Pair, Pair]:
    forward: Pair = {}
    both: Pair = {}
    theirs, ours = make(torch.nn), make(ddp.nn)
    ours.load_state_dict({key: value.detach().numpy() for key, value in theirs.state_dict().items()})
    for name, module, wrap in (("ours", ours, ddp.from_numpy), ("torch", theirs, torch.from_numpy)):
        xs = [wrap(a) for a in inputs]
        g = wrap(numbers(*out, seed=9))

        def run(module: Any = module, xs: Any = xs) -> Any:
            y = module(*xs)
            return y[0] if isinstance(y, tuple) else y

        def run_both(module: Any = module, run: Any = run, g: Any = g) -> None:
            module.zero_grad()
            run().backward(g)

        forward[name], both[name] = run, run_both
    return forward, both


def cases() -> Iterator[tuple[str, tuple[Pair, Pair]]]:
    for batch, heads, length, depth, causal in (
        (16, 4, 128, 32, True),
        (2, 8, 1024, 64, True),
        (2, 8, 1024, 64, False),
    ):
        for inside in (False, True):
            kind = f"{'causal' if causal else 'full'}{', heads inside' if inside else ''}"
            label = f"attention {(batch, heads, length, depth)} {kind}"
            yield label, attention(batch, heads, length, depth, causal, inside)
    for rows in (1000, 50000):
        index = np.random.default_rng(0).integers(0, rows, 2048)
        yield (
            f"embedding {rows} x 128, 2048 looked up",
            layer(lambda nn, rows=rows: nn.Embedding(rows, 128), [index], (2048, 128)),
        )
    for kind in ("RNN", "GRU", "LSTM"):
        for steps, batch, into, hidden in ((50, 32, 64, 128), (100, 16, 256, 256)):
            yield (
                f"{kind} {(steps, batch, into, hidden)}",
                layer(
                    lambda nn, kind=kind, into=into, hidden=hidden: getattr(nn, kind)(into, hidden),
                    [numbers(steps, batch, into)],
                    (steps, batch, hidden),
                ),
            )


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds after two to warm up (default: 20)")
    parser.add_argument("--only", default="", help="only cases whose names begin so")
    parser.add_argument("--json", type=Path, default=Path("sequence_layers.json"), help="where the results go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    medians: dict[str, dict[str, float]] = {}
    for label, pairs in cases():
        if not label.startswith(args.only):
            continue
        found: dict[str, float] = {}
        for part, pair in zip(("forward", "both"), pairs, strict=True):
            rounds = [{who: milliseconds(run) for who, run in pair.items()} for _ in range(args.rounds + 2)][2:]
            found |= {f"{part} {who} ms": statistics.median(each[who] for each in rounds) for who in pair}
            found[f"{part} ratio"] = statistics.median(each["ours"] / each["torch"] for each in rounds)
        medians[label] = found
        print(f"{label:<52}", ", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
    results = {
        "benchmark": "sequence_layers",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rounds": args.rounds,
        "medians": medians,
    }
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
