"""Evaluates a digit classifier: each rank tests its share of the images. The report is the same on any number of ranks.

    python examples/evaluate.py --save digits.safetensors
    ddp-launch -n 4 examples/evaluate.py --load digits.safetensors

The shares differ in length. Rank 0 gathers the predictions, in the order of the test set. Sums and counts are reduced
to rank 0, so that means are exact, however the images are distributed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from train_digits import load_digits, make_loader, make_net, train

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.nn import functional as F

CLASSES = 10


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, metavar="FILE", help="load the weights instead of training")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trained weights to this file")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images (default: 5)")
    parser.add_argument("--batch-size", type=int, default=50, help="test images per batch of a rank (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order (default: 0)")
    return parser.parse_args(argv)


def fit(net: nn.Module, images: np.ndarray, labels: np.ndarray, args: argparse.Namespace) -> None:
    """Trains `net` on all ranks together."""
    comm = collectives.init()
    model = ddp.DataParallel(net, comm)
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = make_loader(images, labels, 64, args.seed, comm)
    train(model, optimizer, loader, args.epochs)
    model.close()


def predict(net: nn.Module, images: np.ndarray, labels: np.ndarray, batch_size: int) -> tuple[np.ndarray, float]:
    """The most likely classes (N,) of images (N, 1, 8, 8), and the sum of their cross entropies."""
    guesses = np.zeros(len(images), np.int64)
    total = 0.0
    starts = range(0, len(images), batch_size)
    with ddp.no_grad(), progress_bar(starts, desc="evaluation", unit="batch") as bar:
        for start in bar:
            stretch = slice(start, start + batch_size)
            logits = net(ddp.from_numpy(images[stretch]))
            guesses[stretch] = logits.numpy().argmax(axis=1)
            total += F.cross_entropy(logits, ddp.from_numpy(labels[stretch]), reduction="sum").item()
    return guesses, total


def confusion_of(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """(CLASSES, CLASSES): how often each label (row) was taken for each class (column)."""
    return np.bincount(labels * CLASSES + guesses, minlength=CLASSES * CLASSES).reshape(CLASSES, CLASSES)


def report(guesses: np.ndarray, confusion: np.ndarray, loss: float, labels: np.ndarray) -> None:
    """Prints accuracy, confusion matrix and first mistakes. guesses, labels: (N,); loss: the mean of the test set"""
    right = int(np.trace(confusion))
    print(f"accuracy {100 * right / len(labels):.2f} % ({right} of {len(labels)}), mean loss {loss:.4f}")
    print("label  taken for")
    print(f"       {' '.join(f'{name:3}' for name in range(CLASSES))}")
    for label, row in enumerate(confusion):
        print(f"{label:5}  {' '.join(f'{count:3}' for count in row)}")
    wrong = np.flatnonzero(guesses != labels)
    listed = ", ".join(f"#{at} ({labels[at]} taken for {guesses[at]})" for at in wrong[:5])
    print(f"first mistakes: {listed or 'none'}")


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    # In float64, so that no prediction depends on the order in which gradients were added.
    images, labels, test_images, test_labels = load_digits(args.seed, "float64")
    net = make_net("float64")
    if args.load is not None:
        net.load_state_dict(ddp.load(args.load))
    else:
        fit(net, images, labels, args)
        if args.save is not None and comm.rank == 0:
            ddp.save(net.state_dict(), args.save)

    net.eval()
    mine = np.array_split(np.arange(len(test_images)), comm.size)[comm.rank]
    guesses, loss_sum = predict(net, test_images[mine], test_labels[mine], args.batch_size)
    everyones = comm.gather(guesses, root=0)
    confusion = comm.reduce(confusion_of(test_labels[mine], guesses), "sum", root=0)
    total = comm.reduce(np.array([loss_sum, len(mine)]), "sum", root=0)
    if comm.rank == 0:
        report(everyones, confusion, total[0] / total[1], test_labels)


if __name__ == "__main__":
    main()
