"""How fast checkpoints are written, against `dd` and `torch.save`, and how long training is held up by a save.

    python -m benchmarks.checkpoint [--mb 500] [--rounds 7] [--folder DIR] [--only write,hold-up] [--json FILE]

write     seconds to write a model with AdamW's state from memory to the disk, fsync included:
              dd          dd if=/dev/zero of=... bs=8M conv=fsync
              ours        ddp.checkpoint.Store, one rank
              ours, 2     two ranks (threads), each of which writes half of it
              torch.save  the same tensors, then fsync; left out without PyTorch
hold-up   seconds by which a save makes training longer: the same steps with and without a save at their beginning.
          sync: training waits for the save; async: it runs in the background. Training leaves one core free

What was written is removed before the next turn; the removal is not timed. Goals: ours at least 0.8 of dd's speed;
async at most 0.1 of sync.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

import collectives
import ddp
from benchmarks import harness
from benchmarks.harness import Rounds
from ddp import nn
from ddp.checkpoint import Checkpointer, Store

MB = 1_000_000
Prepare = Callable[[], Callable[[], object]]  # removes what the last turn wrote → what is timed


def layers(mb: float) -> int:
    """Linear layers of 1024x1024 whose parameters and AdamW's two moments of each take `mb`."""
    return max(1, round(mb * MB / (3 * 4 * (1024 * 1024 + 1024))))


def writers(mb: float, folder: Path) -> dict[str, Prepare]:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        f"{part}.{layer}.{name}": rng.standard_normal(shape, np.float32)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for layer in range(layers(mb))
        for name, shape in (("weight", (1024, 1024)), ("bias", (1024,)))
    }
    path = folder / "written"

    def dd() -> object:
        count = [f"count={sum(array.nbytes for array in arrays.values())}", "iflag=count_bytes"]
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=8M", "conv=fsync", *count]
        return subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    def ours(ranks: int) -> object:
        def save(comm: collectives.Communicator) -> None:
            store = Store(path, comm)
            store.write(1, {name: arrays[name] for name in list(arrays)[comm.rank :: ranks]}, {}, {})
            store.close()

        return collectives.run_threads(save, size=ranks, timeout=600)

    writes: dict[str, Callable[[], object]] = {"dd": dd, "ours": lambda: ours(1), "ours, 2": lambda: ours(2)}
    if harness.has_torch():
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

        def torch_save() -> None:
            with open(path, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        writes["torch.save"] = torch_save

    def prepared(write: Callable[[], object]) -> Callable[[], object]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return write

    return {name: lambda write=write: prepared(write) for name, write in writes.items()}


def flushed(prepare: Prepare) -> float:
    """Seconds of what `prepare` returns, with nothing of before left to be written."""
    write = prepare()
    os.sync()
    return harness.seconds(write)


def hold_up(mb: float, folder: Path, rounds: int) -> Rounds:
    """Seconds that a save adds, by kind; one number a round."""
    linear = [layer for _ in range(layers(mb)) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*linear)
    optimizer = ddp.optim.AdamW(model.parameters(), lr=1e-5)
    x = ddp.tensor(np.random.default_rng(0).standard_normal((64, 1024), np.float32))

    def step() -> None:
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()

    def checkpointer(name: str, background: bool) -> Checkpointer:
        checkpointer = Checkpointer(
            folder / name, model=model, optimizer=optimizer, keep=1, async_save=background, comm=comm
        )
        save(checkpointer)  # makes room for the copy
        checkpointer.wait()
        return checkpointer

    def save(ckpt: Checkpointer) -> None:
        ckpt.step += 1
        ckpt.save()

    comm = collectives.init("single")
    seconds = harness.seconds(step, 3)
    savers = {"sync": checkpointer("sync", False), "async": checkpointer("async", True)}
    count = max(3, round(2 * harness.seconds(lambda: save(savers["sync"])) / seconds))  # a save is over before they are
    print(f"steps of {1e3 * seconds:.0f} ms, {count} of them")

    def stretch(name: str) -> float:
        def run() -> None:
            if name in savers:
                save(savers[name])
            for _ in range(count):
                step()

        os.sync()
        elapsed = harness.seconds(run)
        for ckpt in savers.values():
            ckpt.wait()
        return elapsed

    times: Rounds = {"sync": [], "async": []}
    for _ in range(rounds):
        before, sync, background, after = map(stretch, ("", "sync", "async", ""))
        times["sync"].append(sync - (before + after) / 2)
        times["async"].append(background - (before + after) / 2)
    for ckpt in savers.values():
        ckpt.close()
    return times


def main() -> None:
    parser = harness.parser(__doc__, rounds=7, only=("write", "hold-up"))
    parser.add_argument("--mb", type=float, default=500, help="size of the state in MB (default: 500)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: that of temporary files)")
    args = parser.parse_args()
    results: dict[str, Rounds] = {}
    goals = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as name:
        if "write" in args.only:
            calls = {
                who: lambda prepare=prepare: flushed(prepare) for who, prepare in writers(args.mb, Path(name)).items()
            }
            rows = results["write"] = harness.take_turns(calls, args.rounds, warmup=1)
            for who in ("ours", "ours, 2"):
                goals.append(
                    harness.at_least(f"speed of {who} / dd's", 0.8, harness.median_ratio(rows["dd"], rows[who]))
                )
        if "hold-up" in args.only:
            with threadpoolctl.threadpool_limits(max(1, (os.cpu_count() or 2) - 1)):
                rows = results["hold-up"] = hold_up(args.mb, Path(name), args.rounds)
            goals.append(
                harness.at_most("hold-up, async / sync", 0.1, harness.median_ratio(rows["async"], rows["sync"]))
            )
    for matter, rows in results.items():
        harness.show(f"{matter}, s", rows)
    harness.write(args.json, "checkpoint", goals, mb=args.mb, **results)


if __name__ == "__main__":
    main()
