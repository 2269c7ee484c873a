"""Trains a small CNN on scikit-learn's handwritten digits (1,797 real images of 8x8 pixels), on any number of ranks.

    python examples/train_digits.py
    ddp-launch -n 2 examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py
    ddp-launch -n gpu examples/train_digits.py --device cuda

The global batch of a step has the same samples on any number of ranks, and each rank takes its share. So every run
computes the same numbers up to rounding. `resume_digits.py` adds a log of the loss, and checkpoints.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.data import DataLoader, DistributedSampler, TensorDataset
from ddp.nn import functional as F
from ddp.optim import SGD, Optimizer

CPU = ddp.device("cpu")
TEST_SHARE = 0.2


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of the model and its training."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=at_least(0), default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="images per step, all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of split, weights and order (default: 0)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: one GPU per rank (default: cpu)")
    return parser


def at_least(least: int) -> Any:
    """A type for argparse: a whole number of at least `least`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"should be at least {least}, is {value}")
        return value

    return number


def load_digits(seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (N, 1, 8, 8) with values from 0 to 1 and labels (N,) for training, then the same for the test."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype(dtype)[:, None]
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = np.split(order, [int(len(order) * TEST_SHARE)])
    return images[train], digits.target[train], images[test], digits.target[test]


def make_net(dtype: str) -> nn.Module:
    """A net from (N, 1, 8, 8) images to (N, 10) logits."""
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


def choose_device(name: str, comm: collectives.Communicator) -> ddp.device:
    """The device on which this rank computes; with "cuda" each rank of a node uses another GPU."""
    if name.startswith("cuda") and not ddp.cuda.is_available():
        raise SystemExit(f"--device {name}: no CUDA GPU here, or no CuPy (pip install -e '.[cuda12]')")
    device = ddp.device(name)
    if device.type == "cuda" and device.index is None:
        ddp.cuda.set_device(comm.local_rank % ddp.cuda.device_count())
        device = ddp.device("cuda", ddp.cuda.current_device())
    return device


def make_loader(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    seed: int,
    comm: collectives.Communicator,
    device: ddp.device = CPU,
) -> DataLoader:
    """A loader of this rank's share of each batch, in random order. batch_size: images per step, all ranks"""
    if batch_size % comm.size:
        raise SystemExit(f"--batch-size should be a multiple of {comm.size}, the number of ranks, is {batch_size}")
    data = TensorDataset(images, labels)
    # "exact": every image once per epoch; in the last step some ranks may have fewer images than others, or none.
    sampler = DistributedSampler(data, seed=seed, tail="exact", comm=comm)
    # With a GPU the next batch is copied there while the current one is computed.
    where = {"pin_memory": True, "pin_memory_device": str(device)} if device.type == "cuda" else {}
    return DataLoader(data, batch_size // comm.size, sampler=sampler, **where)


def train(model: ddp.DataParallel, optimizer: Optimizer, loader: DataLoader, epochs: int) -> None:
    """Trains a classifier, on all ranks together."""
    if not len(loader):
        return
    with progress_bar(total=epochs * len(loader), unit="step") as bar:
        for epoch in range(epochs):
            for x, y in loader:
                loss = train_step(model, optimizer, x, y)
                bar.update()
            # The loss of this rank's images in the last step. Reading it in every step would wait for the GPU.
            bar.set_postfix(epoch=epoch + 1, loss=loss.item() / max(1, len(y)), refresh=False)


def train_step(model: ddp.DataParallel, optimizer: Optimizer, x: ddp.Tensor, y: ddp.Tensor) -> ddp.Tensor:
    """Makes one step on all ranks' images, and returns the sum of the loss over this rank's.

    x: (N, 1, 8, 8), this rank's images; y: (N,), their labels
    """
    loss = F.cross_entropy(model(x), y, reduction="sum")
    optimizer.zero_grad()
    model.backward(loss, weight=len(y))  # gradients are means over the images of all ranks
    optimizer.step()
    return loss


def count_right(
    model: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    comm: collectives.Communicator,
    device: ddp.device = CPU,
) -> int:
    """Counts the test images that are classified right; each rank tests its share."""
    share = np.array_split(np.arange(len(images)), comm.size)[comm.rank]
    with ddp.no_grad():
        guesses = model(ddp.from_numpy(images[share]).to(device)).cpu().numpy().argmax(axis=1)
    return int(comm.all_reduce(np.array((guesses == labels[share]).sum())))


def report(right: int, images: int, seconds: float, comm: collectives.Communicator) -> None:
    """Prints on rank 0 how many of the test images were classified right."""
    if comm.rank == 0:
        ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        print(f"test accuracy {100 * right / images:.2f} % ({right} of {images}), {ranks}, {seconds:.1f} s")


def main() -> None:
    args = make_parser(__doc__).parse_args()
    comm = collectives.init()
    device = choose_device(args.device, comm)
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed, args.dtype)
    loader = make_loader(images, labels, args.batch_size, args.seed, comm, device)
    model = ddp.DataParallel(make_net(args.dtype).to(device), comm)
    optimizer = SGD(model.parameters(), lr=args.lr, momentum=0.9)
    start = time.perf_counter()
    train(model, optimizer, loader, args.epochs)
    seconds = time.perf_counter() - start
    right = count_right(model, test_images, test_labels, comm, device)
    report(right, len(test_labels), seconds, comm)


if __name__ == "__main__":
    main()
