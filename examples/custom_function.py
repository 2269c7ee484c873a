"""Your own op: a network whose hidden units are -1 or 1, trained with the straight-through estimator.

    python examples/custom_function.py
    ddp-launch -n 2 examples/custom_function.py

The derivative of the sign function is 0 almost everywhere. So backward treats it as the identity where |input| <= 1,
and passes no gradient elsewhere. Source: Bengio et al. 2013, arXiv:1308.3432; Hubara et al. 2016, arXiv:1602.02830.
"""

from __future__ import annotations

import argparse
from typing import Any

from train_digits import count_right, load_digits, make_loader, train

import collectives
import ddp
from ddp import nn


class Sign(ddp.autograd.Function):
    """y = 1 where x >= 0, else -1;  dx = g where |x| <= 1, else 0."""

    @staticmethod
    def forward(ctx: Any, x: ddp.Tensor) -> ddp.Tensor:
        ctx.save_for_backward(x)
        return ddp.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, g: ddp.Tensor) -> ddp.Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class Binarize(nn.Module):
    """input: any shape."""

    def forward(self, input: ddp.Tensor) -> ddp.Tensor:
        return Sign.apply(input)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--units", type=int, default=256, help="hidden units per layer (default: 256)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order (default: 0)")
    return parser.parse_args(argv)


def make_net(units: int) -> nn.Module:
    """A net from (N, 1, 8, 8) images to (N, 10) logits, with two hidden layers of -1 and 1."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, units),
        nn.BatchNorm1d(units),
        Binarize(),
        nn.Linear(units, units),
        nn.BatchNorm1d(units),
        Binarize(),
        nn.Linear(units, 10),
    )


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed, "float32")
    model = ddp.DataParallel(make_net(args.units), comm)
    optimizer = ddp.optim.Adam(model.parameters(), lr=args.lr)
    loader = make_loader(images, labels, 64, args.seed, comm)
    train(model, optimizer, loader, args.epochs)
    model.eval()
    right = count_right(model, test_images, test_labels, comm)
    hidden = model.module[:4](ddp.from_numpy(test_images))
    if comm.rank == 0:
        print(f"hidden values: {sorted(set(hidden.detach().flatten().tolist()))}")
        print(f"test accuracy {100 * right / len(test_labels):.2f} %")


if __name__ == "__main__":
    main()
