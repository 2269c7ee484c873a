"""How fast checkpoints are written, beside `dd` and `torch.save`, and how long training is held up by a save.

    python benchmarks/checkpoint.py [--mb 500] [--rounds 7] [--folder DIR] [--only write,hold-up] [--json FILE]

write     MB/s from memory to the disk, fsync and all, of a model with AdamW's state:
              dd          dd if=/dev/zero of=... bs=8M conv=fsync
              ours        ddp.checkpoint.Store, one rank
              ours, 2     two ranks (threads) that write half of it each
              torch.save  the same tensors, then fsync; left out where there is no PyTorch
hold-up   s by which a save makes a stretch of training longer: of the same steps with a save at their beginning, waited
          for (sync) or in the background (async), minus without one; training leaves one core free

Implementations take turns in each round, so that all of them see the same disk; ratios are medians over rounds. What
was written is removed before the next turn, outside the time. Goals: ours at least 0.8 of dd's speed; async below 0.1
of sync.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

import numpy as np  # noqa: E402
import threadpoolctl  # noqa: E402

import collectives  # noqa: E402
import ddp  # noqa: E402
from benchmarks import harness  # noqa: E402
from ddp import nn  # noqa: E402
from ddp.checkpoint import Checkpointer, Store  # noqa: E402

Array = np.ndarray[Any, Any]
MB = 1_000_000
GOALS = {"write": (">=", 0.8), "hold-up": ("<", 0.1)}


def main() -> None:
    parser = harness.parser(__doc__, rounds=7)
    parser.add_argument("--mb", type=float, default=500, help="of state (default: 500)")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: that of temporary files)")
    parser.add_argument("--only", type=harness.listed(GOALS), default=[*GOALS], help=f"of {', '.join(GOALS)}")
    args = parser.parse_args()
    found: dict[str, Any] = {"mb": args.mb, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as name:
        folder = Path(name)
        if "write" in args.only:
            calls = {
                name: lambda prepare=prepare: flushed(prepare) for name, prepare in writers(args.mb, folder).items()
            }
            found["write"] = rows = harness.take_turns(calls, args.rounds, warmup=1)  # makes the files' room
            show("write: MB/s", {key: [args.mb / each for each in times] for key, times in rows.items()}, "dd")
        if "hold-up" in args.only:
            found["hold-up"] = rows = hold_up(args.mb, folder, args.rounds)
            show("hold-up: s", rows, "sync")
    harness.write(args.json, "checkpoint", **found)


def flushed(prepare: Callable[[], Callable[[], object]]) -> float:
    """Seconds of what `prepare` returns, with nothing of before left to be written."""
    turn = prepare()
    os.sync()
    return harness.seconds(turn)


# -- write


def state(mb: float) -> dict[str, Array]:
    """Parameters and AdamW's two moments of each: matrices of 4 MB, and a vector for each."""
    rng = np.random.default_rng(0)
    layers = max(1, round(mb * MB / (3 * 4 * (1024 * 1024 + 1024))))
    shapes = {f"{i}.{kind}": shape for i in range(layers) for kind, shape in (("w", (1024, 1024)), ("b", (1024,)))}
    return {
        f"{part}.{name}": rng.standard_normal(shape, np.float32)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def writers(mb: float, folder: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    arrays = state(mb)
    nbytes = sum(array.nbytes for array in arrays.values())

    def dd() -> Callable[[], object]:
        path = folder / "dd"
        path.unlink(missing_ok=True)
        count = [f"count={nbytes}", "iflag=count_bytes"]
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=8M", "conv=fsync", *count]
        return lambda: subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    def ours(ranks: int) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            path = folder / f"ours-{ranks}"
            shutil.rmtree(path, ignore_errors=True)
            names = list(arrays)

            def save(comm: collectives.Communicator) -> None:
                mine = {name: arrays[name] for name in names[comm.rank :: ranks]}
                store = Store(path, comm)
                store.write(1, mine, {}, {})
                store.close()

            return lambda: collectives.run_threads(save, size=ranks, timeout=600)

        return prepare

    found = {"dd": dd, "ours": ours(1), "ours, 2": ours(2)}
    try:
        import torch
    except ImportError:
        return found
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def torch_save() -> Callable[[], object]:
        path = folder / "torch"
        path.unlink(missing_ok=True)

        def save() -> None:
            with open(path, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return save

    return {**found, "torch.save": torch_save}


# -- hold-up


def hold_up(mb: float, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds that a save adds, by kind; one number a round. Training leaves it one core."""
    with threadpoolctl.threadpool_limits(max(1, (os.cpu_count() or 2) - 1)):
        return held_up(mb, folder, rounds)


def held_up(mb: float, folder: Path, rounds: int) -> dict[str, list[float]]:
    model, optimizer, step = training(mb)
    start = time.perf_counter()
    for _ in range(3):
        step()
    each = (time.perf_counter() - start) / 3
    comm = collectives.init("single")

    def saver(name: str, background: bool) -> Callable[[], None]:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True)
        ckpt = Checkpointer(path, model=model, optimizer=optimizer, keep=1, async_save=background, comm=comm)

        def save() -> None:
            ckpt.step += 1
            ckpt.save()

        save()  # makes the room for the copy
        ckpt.wait()
        savers.append(ckpt)
        return save

    savers: list[Checkpointer] = []
    sync, background = saver("sync", False), saver("async", True)
    # As many steps as the save goes on for, and some.
    start = time.perf_counter()
    sync()
    count = max(3, round(2 * (time.perf_counter() - start) / each))

    def stretch(save: Callable[[], None] | None) -> float:
        os.sync()
        start = time.perf_counter()
        if save is not None:
            save()
        for _ in range(count):
            step()
        passed = time.perf_counter() - start
        for ckpt in savers:
            ckpt.wait()
        return passed

    found: dict[str, list[float]] = {"sync": [], "async": []}
    for _ in range(rounds):
        before = stretch(None)
        with_sync, with_async = stretch(sync), stretch(background)
        without = (before + stretch(None)) / 2
        found["sync"].append(with_sync - without)
        found["async"].append(with_async - without)
    for ckpt in savers:
        ckpt.close()
    print(f"steps of {1e3 * each:.0f} ms, {count} of them")
    return found


def training(mb: float) -> tuple[nn.Module, ddp.optim.Optimizer, Callable[[], None]]:
    """A model whose state with AdamW's is of that size, and a step of its training on one batch."""
    layers = max(1, round(mb * MB / (3 * 4 * (1024 * 1024 + 1024))))
    model = nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(1024, 1024), nn.ReLU())])
    optimizer = ddp.optim.AdamW(model.parameters(), lr=1e-5)
    x = ddp.tensor(np.random.default_rng(0).standard_normal((64, 1024), np.float32))

    def step() -> None:
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()

    return model, optimizer, step


# -- what is said


def show(title: str, rows: dict[str, list[float]], base: str) -> None:
    sign, goal = GOALS[title.partition(":")[0]]
    print(f"\n{title:<12} {'median':>8} {'least':>8} {'most':>8}  to {base}")
    for name, values in rows.items():
        judged = f"  goal {sign} {goal}" if name in ("ours", "ours, 2", "async") else ""
        print(f"{name:<12} {harness.spread(values, 8)}  {harness.over(values, rows[base]):.2f}{judged}")


if __name__ == "__main__":
    main()
