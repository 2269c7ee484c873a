"""A rank of the chaos test: a small CNN that learns digits, notes what it does, and may be struck at an exact moment.

`chaos_train.py` starts it. In a folder it leaves its notes: `rank-R.jsonl` has a line a step, and
one when everything is loaded, `pid-R` says who that rank is, and `result-R.json` how it ended.

A strike in the middle of a save or of a load counts what Python does to files of the checkpoints (its audit events:
opening, making, listing, renaming, removing), and ends the process at the N-th of these, or a moment after it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import collectives
import ddp
from benchmarks import models
from collectives import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, DistributedSampler, TensorDataset
from ddp.nn import functional as F
from ddp.optim import SGD, Optimizer
from ddp.optim.lr_scheduler import StepLR

SAMPLES = 150
BATCH = 16  # images a step, over all ranks; the last step of an epoch has fewer
EPOCHS = 2
EVERY = 3  # steps from one save to the next
TINY = 16 << 10  # bytes; of a file on the disk that is called full where none can be had that is
_FILES = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}  # audit events


class Strike(NamedTuple):
    """What strikes a rank at an exact moment.

    start: of the job: 100 times the run, plus the attempt of the launcher in it; rank: which
    during: "save" or "load", of which file events are counted, or "step": it is killed; "asked": at a step it gets
    SIGTERM; "full": from a step on it writes no more than tiny files
    event: the number of that event or step in this start of the job, 0 the first; delay: seconds after it
    """

    start: int
    rank: int
    during: str
    event: int
    delay: float = 0.0


class Struck:
    """Waits for the moment of a rank's strikes, and counts, by phase, what could be struck."""

    def __init__(self, folder: Path, strikes: list[Strike], note: Callable[..., None]) -> None:
        self.folder = str(folder)
        self._note = note
        self.during = "load"
        self.events = {"load": 0, "save": 0, "step": 0}
        self._strikes = strikes
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _FILES and isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(self.folder):
            self._count(self.during)

    def _count(self, during: str) -> None:
        number = self.events[during]
        self.events[during] = self.events[during] + 1
        for strike in self._strikes:
            if (strike.during, strike.event) == (during, number):
                self._note(struck=time.time())
                strike_now(strike.delay)

    def step(self) -> None:
        """A step begins; what happens to files from here on is a save's."""
        self.during = "save"
        for strike in self._strikes:
            if strike.event == self.events["step"] and strike.during == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (TINY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            if strike.event == self.events["step"] and strike.during == "asked":
                os.kill(os.getpid(), signal.SIGTERM)
        self._count("step")


def strike_now(delay: float) -> None:
    """Ends this process at once, or after `delay` seconds, wherever it is then: no handler, no clean-up."""
    if delay == 0.0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, delay)


def digest(net: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return digest.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for notes")
    parser.add_argument("digits", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--run", type=int, default=0, help="how often this job was started before (default: 0)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step (default: 0)")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--memory-every", default="auto", help="auto, never, or a number of steps: see Checkpointer")
    parser.add_argument("--micro-batches", type=int, help="micro-batches of a step (default: each rank has a batch)")
    parser.add_argument("--zero", action="store_true", help="distribute the optimizer's state over the ranks")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--every", type=int, default=EVERY, help="steps from one save to the next")
    parser.add_argument("--strikes", default="[]", help="JSON: a list of the fields of `Strike`")
    return parser.parse_args()


def make_loader(digits: Path, micro_batches: int | None, comm: Communicator) -> DataLoader:
    """Batches of (index, image, label) of this rank."""
    with np.load(digits) as read:
        data = TensorDataset(np.arange(len(read["labels"])), read["images"], read["labels"])
    tail: dict[str, Any] = {"tail": "exact"} if micro_batches is None else {"micro_batches": micro_batches}
    sampler = DistributedSampler(data, seed=1, comm=comm, **tail)
    return DataLoader(data, BATCH // (micro_batches or comm.size), sampler=sampler)


def train(
    checkpointer: Checkpointer,
    model: ddp.DataParallel,
    loader: DataLoader,
    step: Callable[[], None],
    struck: Struck,
    note: Callable[..., None],
    args: argparse.Namespace,
) -> None:
    """Trains to the end, from where the checkpointer begins. step: updates the parameters"""
    loaded = False
    seen: list[int] = []
    for ids, images, labels in checkpointer.resume(loader, args.epochs):
        if not loaded:
            note(loaded=checkpointer.step)
            loaded = True
        if not seen:
            struck.step()
            time.sleep(args.pause)
        seen += ids.tolist()
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        model.backward(loss, weight=len(labels))
        if model.accumulating:
            continue
        step()
        # Of every source of random numbers that a program may use; they are gone on with, too.
        draws = [random.random(), float(np.random.random()), ddp.rand(1).item()]
        progress = {"step": checkpointer.step, "epoch": loader.epoch, "time": time.time()}
        note(**progress, ids=seen, loss=loss.item(), draws=draws)
        seen = []


def main() -> None:
    args = parse_arguments()
    comm = collectives.init(timeout=30.0)
    start = 100 * args.run + int(os.environ.get("DDP_ATTEMPT", "0"))
    (args.folder / f"pid-{comm.rank}").write_text(str(os.getpid()))
    notes = (args.folder / f"rank-{comm.rank}.jsonl").open("a", buffering=1)

    def note(**fields: Any) -> None:
        notes.write(json.dumps({"start": start, "size": comm.size, **fields}) + "\n")

    strikes = [Strike(*strike) for strike in json.loads(args.strikes)]
    own = [strike for strike in strikes if (strike.start, strike.rank) == (start, comm.rank)]
    struck = Struck(args.checkpoints, own, note)
    ddp.manual_seed(1)
    loader = make_loader(args.digits, args.micro_batches, comm)
    model = ddp.DataParallel(models.digits_cnn(ddp), comm, micro_batches=args.micro_batches)
    optimizer: Optimizer
    if args.zero:
        optimizer = ddp.parallel.ZeroOptimizer(model, SGD, lr=0.2, momentum=0.9)
    else:
        optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=5, gamma=0.8)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    random.seed(comm.rank)
    np.random.seed(comm.rank)
    ddp.manual_seed(comm.rank)
    memory: str = args.memory_every
    with Checkpointer(
        args.checkpoints,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        every=args.every,
        async_save=args.async_save,
        memory_every=int(memory) if memory.isdigit() else {"auto": "auto", "never": None}[memory],
        comm=comm,
    ) as checkpointer:
        train(checkpointer, model, loader, step, struck, note, args)
        last = checkpointer.step
    result = {"sha256": digest(model.module), "step": last, "events": struck.events}
    temporary = args.folder / f".result-{comm.rank}"
    temporary.write_text(json.dumps(result))
    temporary.rename(args.folder / f"result-{comm.rank}.json")


if __name__ == "__main__":
    main()
