"""Trains a small CNN on scikit-learn's handwritten digits (1,797 real images of 8x8 pixels), on any number of ranks.

    python examples/train_digits.py
    ddp-launch -n 2 examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py
    ddp-launch -n gpu examples/train_digits.py --device cuda
    ddp-launch -n 2 --max-restarts 3 examples/train_digits.py --checkpoint runs/digits

The global batch of a step is the same samples at any world size; each rank takes its share, so every run computes the
same numbers up to rounding. With --checkpoint a run that was killed, or asked to stop, goes on where it was, exactly,
and on another number of ranks if you like.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, DistributedSampler, TensorDataset
from ddp.metrics import JsonLines
from ddp.nn import functional as F
from ddp.optim import SGD

CPU = ddp.device("cpu")
TEST_SHARE = 0.2
LATE = 2  # steps that a loss has to come from a GPU before it is logged, so that the host does not wait for it


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=_at_least(0), default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--batch-size", type=_at_least(1), default=64, help="images a step, of all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of split, weights and order (default: 0)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: one GPU a rank (default: cpu)")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write one JSON line a step: step, loss")
    parser.add_argument("--checkpoint", metavar="DIR", help="save there, a path or URL, and go on from what is there")
    parser.add_argument("--every", type=_at_least(1), default=100, help="steps between two saves (default: 100)")
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


def choose_device(name: str, comm: collectives.Communicator) -> ddp.device:
    """Where this rank computes: with "cuda" each rank of a node has a GPU of its own."""
    device = ddp.device(name)
    if device.type == "cuda" and device.index is None:
        ddp.cuda.set_device(comm.local_rank % max(1, ddp.cuda.device_count()))
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
    """Batches of `batch_size` images and labels over all ranks, of which this one reads its share, in random order."""
    if batch_size % comm.size:
        raise SystemExit(f"--batch-size should be a multiple of {comm.size}, the number of ranks, is {batch_size}")
    data = TensorDataset(images, labels)
    # "exact": every image once an epoch; in its last step some ranks may have fewer than others, or none.
    sampler = DistributedSampler(data, seed=seed, tail="exact", comm=comm)
    # On a GPU the next batch is copied there while this one is computed on.
    where = {"pin_memory": True, "pin_memory_device": str(device)} if device.type == "cuda" else {}
    return DataLoader(data, batch_size // comm.size, sampler=sampler, **where)


def main() -> None:
    args = parse()
    comm = collectives.init()
    if args.device.startswith("cuda") and not ddp.cuda.is_available():
        raise SystemExit(f"--device {args.device}: no CUDA GPU here, or no CuPy (pip install -e '.[cuda12]')")
    device = choose_device(args.device, comm)
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed, args.dtype)
    loader = make_loader(images, labels, args.batch_size, args.seed, comm, device)
    model = ddp.DataParallel(make_net(args.dtype).to(device), comm)
    optimizer = SGD(model.parameters(), lr=args.lr, momentum=0.9)
    done, batches = 0, chain.from_iterable(repeat(loader, args.epochs))
    start = time.perf_counter()
    with ExitStack() as stack:
        metrics = None if args.metrics is None else stack.enter_context(JsonLines(args.metrics, comm=comm))
        if args.checkpoint is not None:
            checkpointer = Checkpointer(args.checkpoint, model=model, optimizer=optimizer, every=args.every, comm=comm)
            stack.enter_context(checkpointer).load()
            done, batches = checkpointer.step, checkpointer.resume(loader, args.epochs)
        total = args.epochs * len(loader)
        bar = stack.enter_context(progress_bar(enumerate(batches, done), total=total, initial=done, unit="step"))
        underway: deque[tuple[int, ddp.cuda.Fetched, int]] = deque()

        def log(at_most: int) -> None:
            """Logs what is under way, the oldest first, until `at_most` are left."""
            while len(underway) > at_most:
                step, loss, count = underway.popleft()
                loss_sum, samples = comm.all_reduce(np.array([loss.value(), count]))
                if metrics is not None:
                    metrics.log(step, loss=loss_sum / samples)
                bar.set_postfix(epoch=loader.epoch + 1, loss=loss_sum / samples, refresh=False)

        for step, (x, y) in bar:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            optimizer.zero_grad()
            model.backward(loss, weight=len(y))
            optimizer.step()
            underway.append((step, ddp.cuda.fetch(loss), len(y)))
            log(LATE if device.type == "cuda" else 0)
        log(0)
    seconds = time.perf_counter() - start
    right = count_right(model, test_images, test_labels, comm, device)
    if comm.rank == 0:
        share = 100 * right / len(test_labels)
        ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        print(f"test accuracy {share:.2f} % ({right} of {len(test_labels)}), {ranks}, {seconds:.1f} s")


def count_right(
    model: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    comm: collectives.Communicator,
    device: ddp.device = CPU,
) -> int:
    """How many test images are classified right, each rank counting its share."""
    mine = np.array_split(np.arange(len(images)), comm.size)[comm.rank]
    with ddp.no_grad():
        guesses = model(ddp.from_numpy(images[mine]).to(device)).cpu().numpy().argmax(axis=1)
    return int(comm.all_reduce(np.array((guesses == labels[mine]).sum())))


if __name__ == "__main__":
    main()
