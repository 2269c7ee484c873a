"""Trains a small CNN on scikit-learn's handwritten digits (1,797 real images of 8x8 pixels), on any number of ranks.

    python examples/train_digits.py
    ddp-launch -n 2 examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py

The global batch of a step is the same samples at any world size; each rank takes its slice, so every run computes the
same numbers up to rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import collectives
import ddp
from ddp import nn
from ddp.nn import functional as F
from ddp.optim import SGD

TEST_SHARE = 0.2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=_at_least(0), default=20, help="passes over the training images (default: 20)")
    parser.add_argument(
        "--batch-size", type=_at_least(1), default=64, help="images a step, over all ranks (default: 64)"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument(
        "--seed", type=_at_least(0), default=0, help="of the split, the weights and the order (default: 0)"
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write one JSON line a step: step, loss")
    return parser.parse_args(argv)


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"should be at least {least}, is {value}")
        return value

    return number


def load_digits(seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (N, 1, 8, 8) from 0 to 1 and labels (N,): of training, then of test."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype(dtype)[:, None]
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = np.split(order, [int(len(order) * TEST_SHARE)])
    return images[train], digits.target[train], images[test], digits.target[test]


def make_net(dtype: str) -> nn.Module:
    """(N, 1, 8, 8) images to (N, 10) logits."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return net.to(getattr(ddp, dtype))


def batches(samples: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The global batches of an epoch, the same on every rank; the last one may be smaller."""
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    return [order[start : start + batch_size] for start in range(0, samples, batch_size)]


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed, args.dtype)
    model = ddp.DataParallel(make_net(args.dtype), comm)
    optimizer = SGD(model.parameters(), lr=args.lr, momentum=0.9)
    start = time.perf_counter()
    with ExitStack() as stack:
        metrics = stack.enter_context(args.metrics.open("w")) if args.metrics and comm.rank == 0 else None
        steps = args.epochs * len(batches(len(images), args.batch_size, args.seed, 0))
        bar = stack.enter_context(_progress_bar(steps, comm.rank))
        step = 0
        for epoch in range(args.epochs):
            for batch in batches(len(images), args.batch_size, args.seed, epoch):
                mine = np.array_split(batch, comm.size)[comm.rank]
                loss = F.cross_entropy(
                    model(ddp.from_numpy(images[mine])), ddp.from_numpy(labels[mine]), reduction="sum"
                )
                optimizer.zero_grad()
                model.backward(loss, weight=len(mine))
                optimizer.step()
                total = comm.reduce(loss.detach().numpy(), "sum", root=0)
                if comm.rank == 0:
                    mean = float(total) / len(batch)
                    if metrics is not None:
                        metrics.write(json.dumps({"step": step, "loss": mean}) + "\n")
                    bar.set_postfix_str(f"epoch {epoch + 1}, loss {mean:.4f}", refresh=False)
                bar.update()
                step += 1
    seconds = time.perf_counter() - start
    right = count_right(model, test_images, test_labels, comm)
    if comm.rank == 0:
        share = 100 * right / len(test_labels)
        ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        print(f"test accuracy {share:.2f} % ({right} of {len(test_labels)}), {ranks}, {seconds:.1f} s")


def count_right(model: nn.Module, images: np.ndarray, labels: np.ndarray, comm: collectives.Communicator) -> int:
    """How many test images are classified right, each rank counting its share."""
    mine = np.array_split(np.arange(len(images)), comm.size)[comm.rank]
    with ddp.no_grad():
        guesses = model(ddp.from_numpy(images[mine])).numpy().argmax(axis=1)
    return int(comm.all_reduce(np.array((guesses == labels[mine]).sum())))


def _progress_bar(steps: int, rank: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=steps, unit="step", disable=rank != 0, file=sys.stderr)


if __name__ == "__main__":
    main()
