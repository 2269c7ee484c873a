"""Public PyTorch scripts, unchanged, with every `import torch` read as an import of ddp, compared with PyTorch.

    python -m benchmarks.ports CHECKOUTS [--only A,B] [--json FILE]

CHECKOUTS: a folder with clones of https://github.com/pytorch/examples (as `examples`) and
https://github.com/karpathy/nanoGPT (as `nanoGPT`). Each script runs twice, in a copy of its folder, in float64, with
the same initial weights, batches, noise and dropout: PyTorch draws its random numbers from ddp (benchmarks/ported). All
losses that go backward, and all numbers that the script reads by `item()`, are compared. torchvision is replaced on
both sides by a few lines (benchmarks/ported/torchvision): digits of scikit-learn, and no downloads.

Goal: each script ends, and the largest difference, |ours - theirs| / max(1, |theirs|), is at most 1e-10.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness

GOAL = 1e-10
LIBRARIES = ("torch", "ddp")
SECONDS = 600.0  # a script may take


def corpus(folder: Path) -> None:
    """A small text of made words in the place of WikiText-2."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(200)]
    for name, lines in (("train", 120), ("valid", 30), ("test", 30)):
        text = "\n".join(" ".join(rng.choice(words, 12)) for _ in range(lines))
        (folder / "data/wikitext-2").mkdir(parents=True, exist_ok=True)
        (folder / f"data/wikitext-2/{name}.txt").write_text(text)


def tokens(folder: Path) -> None:
    """A small data set of nanoGPT, in which few tokens are frequent."""
    (folder / "data/tiny").mkdir()
    for seed, name in enumerate(("train", "val")):
        drawn = np.random.default_rng(seed).geometric(0.1, 4000) % 256
        drawn.astype(np.uint16).tofile(folder / f"data/tiny/{name}.bin")
    (folder / "data/tiny/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


@dataclass(frozen=True)
class Port:
    """One script. runs: command lines, one after the other; seed: where random numbers begin.

    folder: of the checkouts; prepare: makes data in the copy of it that the script runs in
    """

    name: str
    folder: str
    runs: Sequence[str]
    prepare: Callable[[Path], None] = lambda folder: None
    seed: int = 0


def _example(name: str, *runs: str, **options: Any) -> Port:
    return Port(name, f"examples/{name}", runs, **options)


_GPT = (
    "train.py --dataset=tiny --device=cpu --dtype=float32 --compile=False --eval_iters=2 --eval_interval=5 "
    "--log_interval=1 --block_size=32 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --lr_decay_iters=20 "
    "--warmup_iters=4 --gradient_accumulation_steps=2"
)
_GAN = "main.py --batchSize 16 --ngf 4 --ndf 4 --nz 10 --manualSeed 1"
_WORDS = "main.py --epochs 2 --emsize 24 --nhid 24 --bptt 10 --batch_size 8 --log-interval 5"
PORTS = (
    Port("nanoGPT", "nanoGPT", [f"{_GPT} --max_iters=15", f"{_GPT} --max_iters=20 --init_from=resume"], tokens),
    _example("mnist", "main.py --epochs 1 --batch-size 32 --log-interval 1 --save-model"),
    _example("vae", "main.py --epochs 2 --batch-size 64 --log-interval 1"),
    _example(
        "dcgan",
        f"{_GAN} --dataset mnist --dataroot . --workers 1 --niter 1",
        f"{_GAN} --dataset mnist --dataroot . --netG netG_epoch_0.pth --netD netD_epoch_0.pth --dry-run",
        f"{_GAN} --dataset fake --workers 0 --dry-run",
    ),
    _example("mnist_rnn", "main.py --epochs 2 --log-interval 1"),
    _example(
        "word_language_model",
        *(f"{_WORDS} --model {model} --dropout 0 --lr 2" for model in ("LSTM", "GRU", "RNN_TANH", "RNN_RELU")),
        f"{_WORDS} --model LSTM --nlayers 1 --tied --dropout 0.2 --use-optimizer --lr 0.01",
        "generate.py --words 40",
        prepare=corpus,
    ),
    _example("siamese_network", "main.py --epochs 1 --batch-size 64 --log-interval 1 --lr 0.1"),
    # Seed 0 needs more steps, on a loss where every rounding grows with them.
    _example("regression", "main.py", seed=7),
    _example(
        "mnist_forward_forward", "main.py --epochs 20 --train_size 256 --test_size 128 --log-interval 1 --save-model"
    ),
    _example("mnist_hogwild", "main.py --epochs 1 --num-processes 1 --log-interval 1 --save_model"),
)


@dataclass(frozen=True)
class Run:
    """noted: the numbers of each process, in the order in which these began; seconds; error: what went wrong, or ""."""

    noted: list[list[float]]
    seconds: float
    error: str


def run(port: Port, checkouts: Path, library: str) -> Run:
    """Runs a script with one of the libraries."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "script")
        out = Path(temporary, "out")
        shutil.copytree(checkouts / port.folder, folder)
        (folder / "results").mkdir(exist_ok=True)
        out.mkdir()
        port.prepare(folder)
        path = harness.python_path(harness.ROOT / "benchmarks/ported", harness.ROOT)
        ours = {"PYTHONPATH": path, "PORTS_LIBRARY": library, "PORTS_OUT": str(out), "PORTS_SEED": str(port.seed)}
        env = {**os.environ, **ours}
        began = time.perf_counter()
        error = ""
        for line in port.runs:
            command = [sys.executable, "-W", "ignore", *line.split()]
            completed = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)
            if completed.returncode:
                error = f"{line}: {completed.stderr.strip()[-2000:]}"
                break
        elapsed = time.perf_counter() - began
        noted = [[float(line) for line in file.read_text().split()] for file in sorted(out.iterdir())]
        return Run(noted, elapsed, error)


def difference(actual: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """The largest |actual - expected| / max(1, |expected|); inf if one has more numbers, or nan."""
    if [len(run) for run in actual] != [len(run) for run in expected]:
        return float("inf")
    a, b = (np.array([number for run in noted for number in run]) for noted in (actual, expected))
    largest = float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b)), initial=0.0))
    return float("inf") if math.isnan(largest) else largest


def main() -> None:
    parser = harness.parser(__doc__, only=[port.name for port in PORTS])
    parser.add_argument("checkouts", type=Path, help="folder with the clones")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(harness.row("script", ("numbers", "difference", "PyTorch s", "ddp s"), 24))
    for port in [port for port in PORTS if port.name in args.only]:
        runs = {library: run(port, args.checkouts, library) for library in LIBRARIES}
        torch = runs["torch"]
        ours = runs["ddp"]
        largest = difference(ours.noted, torch.noted)
        count = sum(len(run) for run in torch.noted)
        cells = (count, f"{largest:.1e}", f"{torch.seconds:.1f}", f"{ours.seconds:.1f}")
        print(harness.row(port.name, cells, 24), flush=True)
        failed = {library: run.error for library, run in runs.items() if run.error}
        for library, error in failed.items():
            print(f"  {library}: {error}")
        row = {"script": port.name, "runs": list(port.runs), "seed": port.seed, "numbers": count, "difference": largest}
        rows.append({**row, "seconds": {name: run.seconds for name, run in runs.items()}, "failed": [*failed]})
    harness.write(args.json, "ports", goal=GOAL, rows=rows)
    if any(row["failed"] or not row["difference"] <= GOAL for row in rows):
        sys.exit("a script did not end, or its losses differ by more than the goal")


if __name__ == "__main__":
    main()
