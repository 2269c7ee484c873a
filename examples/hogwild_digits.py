"""Trains a network on scikit-learn's handwritten digits in several processes that share its weights without locks.

    python examples/hogwild_digits.py
    python examples/hogwild_digits.py --processes 4 --epochs 30

Each process computes gradients on its own batches, and updates the shared model as soon as it has them. No process
waits for another one, and updates may overwrite each other; the network learns all the same. So no two runs end with
the same weights. Every sample is used once per epoch, by one of the processes.

Source: Niu et al. 2011, arXiv:1106.5730.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

import ddp
import ddp.multiprocessing as mp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.nn import functional as F
from ddp.optim import SGD

TEST_SHARE = 0.2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes that train (default: 2)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step (default: 16)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order (default: 0)")
    return parser.parse_args(argv)


def load_digits(seed: int) -> tuple[ddp.Tensor, ddp.Tensor, ddp.Tensor, ddp.Tensor]:
    """Images (N, 64) with values from 0 to 1 and labels (N,) for training, then the same for the test."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = ddp.tensor((digits.data / 16.0).astype("float32"))
    labels = ddp.tensor(digits.target)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = np.split(order, [int(len(order) * TEST_SHARE)])
    return images[train], labels[train], images[test], labels[test]


def make_net() -> nn.Module:
    """A net from (N, 64) images to (N, 10) logits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(index: int, model: nn.Module, images: ddp.Tensor, labels: ddp.Tensor, args: argparse.Namespace) -> None:
    """Runs in each process: trains the shared model on every n-th batch of each epoch, for n processes."""
    optimizer = SGD(model.parameters(), lr=args.lr)
    starts = range(index * args.batch_size, len(images), args.processes * args.batch_size)
    # Only process 0 shows its progress.
    with progress_bar(total=args.epochs * len(starts), unit="step", rank=index) as bar:
        for epoch in range(args.epochs):
            order = np.random.default_rng((args.seed, epoch)).permutation(len(images))
            for start in starts:
                batch = order[start : start + args.batch_size]
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                bar.set_postfix(loss=loss.item(), refresh=False)
                bar.update()


def main() -> None:
    args = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process that is spawned uses one core
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed)
    model = make_net().share_memory()
    start = time.perf_counter()
    mp.spawn(train, (model, images, labels, args), nprocs=args.processes)
    seconds = time.perf_counter() - start
    with ddp.no_grad():
        right = int((model(test_images).argmax(dim=1) == test_labels).sum())
    share = 100 * right / len(test_labels)
    print(f"test accuracy {share:.2f} % ({right} of {len(test_labels)}), {args.processes} processes, {seconds:.1f} s")


if __name__ == "__main__":
    main()
