"""What a loader costs: ours and PyTorch's side by side on the same arrays, from 0, 1 and 2 workers.

    python -m benchmarks.dataloader [--rounds 9] [--only samples,tensors,start] [--json FILE]

samples   samples/s of a dataset whose `__getitem__` gives (array, label), each a NumPy array, collated by default
tensors   samples/s of each library's own TensorDataset
start     from `iter(loader)` to the first batch, of new workers

Arrays of 3 KB (batches of 64) and of 600 KB (batches of 16), float32, read in random order; of every batch one number
in each line of the cache is read. Each round runs every implementation once, so that all of them see the same machine.
PyTorch starts workers by fork, which copies a process that may hold MPI or CUDA, or by forkserver or spawn. Ours come
from a fork server, which is started once, when a process makes its first loader with workers: that first start is the
row "start, first". Workers that are not forked from the process itself get a copy of the dataset, 12 MB for arrays of
3 KB and 98 MB for those of 600 KB. Needs PyTorch (`pip install '.[bench]'`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Goal, Rounds

MATTERS = ("samples", "tensors", "start")
WORKERS = (0, 1, 2)
SIZES = {"3 KB": (768, 64, 4096), "600 KB": (153_600, 16, 160)}  # floats a sample, samples a batch, samples
RATE = 1.0  # goal: at least this share of PyTorch's samples/s
START = 0.5  # goal: at most this share of PyTorch's time to start
WAYS = ("fork", "forkserver", "spawn")
SLOW_RUNS = 3  # rounds of first starts, which take seconds


class Samples:
    """A dataset as people write it."""

    def __init__(self, floats: int, length: int) -> None:
        self.x = np.random.default_rng(0).random((length, floats), np.float32)
        self.y = np.arange(length)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]


def loaders(matter: str, dataset: Samples, batch: int, workers: int) -> dict[str, Callable[[], Any]]:
    """Implementation → what makes its loader."""
    import torch
    import torch.utils.data as torch_data

    import ddp
    from ddp import data as ours

    options = {"batch_size": batch, "shuffle": True, "num_workers": workers}
    our_dataset: Any = dataset
    torch_dataset: Any = dataset
    if matter == "tensors":
        our_dataset = ours.TensorDataset(ddp.from_numpy(dataset.x), ddp.from_numpy(dataset.y))
        torch_dataset = torch_data.TensorDataset(torch.from_numpy(dataset.x), torch.from_numpy(dataset.y))
    makers: dict[str, Callable[[], Any]] = {"ours": partial(ours.DataLoader, our_dataset, **options)}
    for way in WAYS if matter == "start" else WAYS[:1]:
        context = {"multiprocessing_context": way if workers else None}
        makers[f"PyTorch, {way}"] = partial(torch_data.DataLoader, torch_dataset, **options, **context)
    return makers


def rate(make: Callable[[], Any]) -> float:
    """Samples a second from the first batch on, which is when workers have started."""
    batches = iter(make())
    x, _ = next(batches)
    total = 0.0
    count = 0
    start = time.perf_counter()
    for x, _ in batches:
        total += float(x.numpy()[:, ::16].sum())  # by the same library, whichever made the batch
        count += len(x)
    elapsed = time.perf_counter() - start
    assert total > 0
    return count / elapsed


def start(make: Callable[[], Any]) -> float:
    """Seconds from `iter` to the first batch."""
    loader = make()
    kept = []  # a pass that is dropped ends its workers
    return harness.seconds(lambda: kept.append(batches := iter(loader)) or next(batches))


FIRST = """
import time
from {home} import DataLoader
from benchmarks.dataloader import Samples

if __name__ == "__main__":
    dataset = Samples(768, 4096)
    begin = time.perf_counter()
    next(iter(DataLoader(dataset, batch_size=64, shuffle=True, num_workers={workers})))
    print(time.perf_counter() - begin)
"""


def first(name: str, workers: int) -> float:
    """Seconds from the first loader that a process makes to its first batch: nothing has been started before."""
    return harness.printed(FIRST.format(home="ddp.data" if name == "ours" else "torch.utils.data", workers=workers))


def measured(matters: Sequence[str], rounds: int) -> Iterator[tuple[str, Rounds]]:
    """Row, and implementation → one number a round: samples/s, or seconds of a start."""
    for matter in matters:
        timed = start if matter == "start" else rate
        for size, (floats, batch, length) in SIZES.items():
            dataset = Samples(floats, length)
            for workers in WORKERS[1:] if matter == "start" else WORKERS:
                makers = loaders(matter, dataset, batch, workers)
                calls = {name: partial(timed, make) for name, make in makers.items()}
                yield f"{matter}, {size}, {workers} workers", harness.take_turns(calls, rounds, warmup=1)
        if matter == "start":
            for workers in WORKERS[1:]:
                firsts = {name: partial(first, name, workers) for name in ("ours", "PyTorch, fork")}
                yield f"start, first, {workers} workers", harness.take_turns(firsts, SLOW_RUNS, warmup=0)


def main() -> None:
    args = harness.parser(__doc__, rounds=9, only=MATTERS).parse_args()
    results: dict[str, Rounds] = {}
    goals: list[Goal] = []
    for row, rounds in measured(args.only, args.rounds):
        results[row] = rounds
        starts = row.startswith("start")
        harness.show(f"{row}, {'ms' if starts else 'samples/s'}", rounds, 1e3 if starts else 1, 1)
        for name, values in rounds.items():
            if name != "ours":
                what = f"{row}: ours / {name}"
                ratio = harness.median_ratio(rounds["ours"], values)
                goals.append(harness.at_most(what, START, ratio) if starts else harness.at_least(what, RATE, ratio))
    harness.write(args.json, "dataloader", goals, rounds=results)


if __name__ == "__main__":
    main()
