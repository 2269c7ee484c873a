"""Trains as `train_digits.py` does, logs the loss of every step, and continues from its last checkpoint.

    python examples/resume_digits.py --checkpoint runs/digits
    ddp-launch -n 2 --max-restarts 3 examples/resume_digits.py --checkpoint runs/digits --metrics runs/digits.jsonl

If a run was killed, or asked to stop (Ctrl-C, `kill -USR1`), start the same command again: it continues exactly, also
on another number of ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path

import numpy as np
from train_digits import (
    at_least,
    choose_device,
    count_right,
    load_digits,
    make_loader,
    make_net,
    make_parser,
    report,
    train_step,
)

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp.checkpoint import Checkpointer
from ddp.metrics import JsonLines
from ddp.optim import SGD


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write one JSON line per step: step, loss")
    parser.add_argument("--checkpoint", metavar="DIR", help="a path or URL: save there, and continue from there")
    parser.add_argument("--every", type=at_least(1), default=100, help="steps between two saves (default: 100)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    comm = collectives.init()
    device = choose_device(args.device, comm)
    ddp.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_digits(args.seed, args.dtype)
    loader = make_loader(images, labels, args.batch_size, args.seed, comm, device)
    model = ddp.DataParallel(make_net(args.dtype).to(device), comm)
    optimizer = SGD(model.parameters(), lr=args.lr, momentum=0.9)
    first_step = 0
    batches: Iterable[tuple[ddp.Tensor, ddp.Tensor]] = chain.from_iterable(repeat(loader, args.epochs))
    start = time.perf_counter()
    with ExitStack() as stack:
        metrics = None if args.metrics is None else stack.enter_context(JsonLines(args.metrics, comm=comm))
        if args.checkpoint is not None:
            checkpointer = Checkpointer(args.checkpoint, model=model, optimizer=optimizer, every=args.every, comm=comm)
            stack.enter_context(checkpointer).load()
            first_step = checkpointer.step
            batches = checkpointer.resume(loader, args.epochs)
        total = args.epochs * len(loader)
        bar = stack.enter_context(progress_bar(total=total, initial=first_step, unit="step"))
        for step, (x, y) in enumerate(batches, first_step):
            loss = train_step(model, optimizer, x, y)
            # Reading the loss waits for the GPU in each step; docs/cuda.md shows how to read it later, without waiting.
            loss_sum, count = comm.all_reduce(np.array([loss.item(), len(y)]))
            if metrics is not None:
                metrics.log(step, loss=loss_sum / count)
            bar.set_postfix(epoch=loader.epoch + 1, loss=loss_sum / count, refresh=False)
            bar.update()
    seconds = time.perf_counter() - start
    right = count_right(model, test_images, test_labels, comm, device)
    report(right, len(test_labels), seconds, comm)


if __name__ == "__main__":
    main()
