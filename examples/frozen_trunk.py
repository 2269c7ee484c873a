"""Fine-tuning: a CNN learns the digits 0 to 4; then its trunk is frozen, and a new head learns 5 to 9 from few images.

    python examples/frozen_trunk.py
    ddp-launch -n 2 examples/frozen_trunk.py

A frozen trunk has no backward, and saves nothing for it. Its parameters have no bucket and no optimizer state.
"""

from __future__ import annotations

import argparse

import numpy as np
from train_digits import count_right, load_digits, make_loader, train

import collectives
import ddp
from ddp import nn


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over each part of the data (default: 10)")
    parser.add_argument("--few", type=int, default=100, help="images of 5 to 9 that the new head sees (default: 100)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 3e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order (default: 0)")
    return parser.parse_args(argv)


def make_trunk() -> nn.Module:
    """A net from (N, 1, 8, 8) images to (N, 256) features."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


def fit(net: nn.Module, images: np.ndarray, labels: np.ndarray, args: argparse.Namespace) -> ddp.DataParallel:
    """Trains the parameters of `net` that require grad."""
    model = ddp.DataParallel(net)
    optimizer = ddp.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    comm = collectives.init()
    loader = make_loader(images, labels, 32, args.seed, comm)
    train(model, optimizer, loader, args.epochs)
    return model


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed, "float32")
    low = labels < 5
    high = labels >= 5
    test_low = test_labels < 5
    test_high = test_labels >= 5

    trunk = make_trunk()
    model = fit(nn.Sequential(trunk, nn.Linear(256, 5)), images[low], labels[low], args)
    model.eval()
    right = count_right(model, test_images[test_low], test_labels[test_low], comm)
    if comm.rank == 0:
        print(f"digits 0 to 4, all parameters trained: {100 * right / test_low.sum():.1f} % right")
    model.close()

    # eval() also freezes the running statistics of batch normalization.
    trunk.requires_grad_(False).eval()
    few_images = images[high][: args.few]
    few_labels = labels[high][: args.few] - 5
    before = [p.numpy().copy() for p in trunk.parameters()]
    model = fit(nn.Sequential(trunk, nn.Linear(256, 5)), few_images, few_labels, args)
    assert all(np.array_equal(p.numpy(), old) for p, old in zip(trunk.parameters(), before, strict=True))
    right = count_right(model, test_images[test_high], test_labels[test_high] - 5, comm)
    if comm.rank == 0:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(
            f"digits 5 to 9, a new head of {trained} parameters, trained on {len(few_images)} images: "
            f"{100 * right / test_high.sum():.1f} % right"
        )


if __name__ == "__main__":
    main()
