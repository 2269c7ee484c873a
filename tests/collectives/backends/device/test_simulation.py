"""Random programs on GPUs whose streams run in random order: right numbers without a host wait, for every seed.

And the other way round: without any one of the edges, or without what keeps the buffers, some seed gives wrong numbers.
A simulation that cannot find a planted bug would prove nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives.backends.device import cuda, device_communicator
from collectives.backends.nccl import watchdog
from tests.collectives.backends.device.conftest import MakeRig
from tests.collectives.backends.device.fake_nccl import FakeLibrary

LENGTH = 60  # of an array
OPS = "all_reduce", "float16", "reduce", "reduce_scatter", "broadcast", "gather", "all_gather", "scatter", "all_to_all"


def program(comm: Any, cupy: Any, seed: int) -> None:
    """Collectives on fresh arrays, some asynchronous, each result checked after more kernels."""
    dice = random.Random(seed)
    size = comm.size
    rank = comm.rank
    under_way: list[tuple[Any, Any]] = []
    bystanders = []  # arrays that no collective has anything to do with

    def finish() -> None:
        work, expected = under_way.pop(0)
        result = work.wait()
        if expected is None:
            assert result is None
            return
        doubled = result * 2
        del result, work
        assert_array_equal(doubled.get(), 2 * expected)

    for step in range(6):
        name = dice.choice(OPS)
        root = dice.randrange(size)
        base = np.arange(LENGTH, dtype=np.float16 if name == "float16" else np.float32) % 50
        everyones = [(base + r) * 2 for r in range(size)]
        mine = cupy.asarray(base) + base.dtype.type(rank)
        x = mine * 2  # the kernel that the collective must not overtake
        del mine
        known = dice.choice((None, "equal"))
        uneven = [LENGTH - 3 * r for r in range(size)]
        on_root = rank == root
        if name in ("all_reduce", "float16"):
            into = dice.choice((None, x))
            work = comm.all_reduce(x, out=into, async_op=True)
            expected: Any = sum(everyones)
        elif name == "reduce":
            work = comm.reduce(x, "max", root, async_op=True)
            expected = everyones[-1] if on_root else None
        elif name == "reduce_scatter":
            work = comm.reduce_scatter(x, async_op=True)
            expected = np.array_split(sum(everyones), size)[rank]
        elif name == "broadcast":
            work = comm.broadcast(x, root, async_op=True)
            expected = everyones[root]
        elif name == "gather":
            work = comm.gather(x, root, lengths=known, async_op=True)
            expected = np.concatenate(everyones) if on_root else None
        elif name == "all_gather":
            work = comm.all_gather(x[: uneven[rank]], lengths=dice.choice((None, uneven)), async_op=True)
            expected = np.concatenate([part[:n] for part, n in zip(everyones, uneven, strict=True)])
        elif name == "scatter":
            work = comm.scatter(x, root, out=cupy.empty(len(np.array_split(base, size)[rank]), x.dtype), async_op=True)
            expected = np.array_split(everyones[root], size)[rank]
        else:
            work = comm.all_to_all(x, async_op=True)
            expected = np.concatenate([np.array_split(part, size)[rank] for part in everyones])
        if dice.random() < 0.5:
            comm.all_reduce(x, async_op=True)  # nobody waits for it
            comm.barrier()  # it is on its stream, or done, and its result is nobody's
            bystanders.extend(cupy.asarray(np.arange(LENGTH, dtype=np.float32)) * 1 for _ in range(3))
        del x  # whoever still needs it must hold it
        under_way.append((work, expected))
        del work, expected
        scrap = cupy.empty(LENGTH, np.float32)  # the caller goes on, in memory that just became free
        scrap[:] = -1
        del scrap
        if dice.random() < 0.5 or step == 5:
            while under_way:
                finish()
    for bystander in bystanders:
        assert_array_equal(bystander.get(), np.arange(LENGTH))


def simulate(rig: MakeRig, nccl: Any, seed: int) -> None:
    rig(2 + seed % 2, nccl, seed).run(lambda comm, cupy: program(comm, cupy, seed))


TRANSPORTS = pytest.mark.parametrize("nccl", [None, FakeLibrary()], ids=["staged", "nccl"])


@pytest.mark.timeout(600)  # the full count takes minutes
@TRANSPORTS
def test_every_order_that_cuda_allows_gives_the_right_numbers(
    rig: MakeRig, nccl: Any, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(3, 30)):
        try:
            simulate(rig, nccl, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
            raise


def without(monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    """Takes one edge out of the code under test."""
    if edge in ("record_ready", "new"):  # compute before communication; for memory allocated later
        whole = cuda.Cuda.record_event

        def record_event(self: Any, stream: Any) -> Any:
            caller = sys._getframe(1).f_code.co_name
            return self.xp.cuda.Event(disable_timing=True) if caller == edge else whole(self, stream)

        monkeypatch.setattr(cuda.Cuda, "record_event", record_event)
    elif edge == "wait":  # communication before compute
        monkeypatch.setattr(device_communicator.DeviceArrays, "wait", lambda self: None)
    elif edge == "watch":  # what keeps the buffers
        monkeypatch.setattr(watchdog.Watchdog, "watch", lambda self, event, buffers, *_: None)
    else:  # the host sees a copy done before it transfers what was copied
        monkeypatch.setattr(cuda.Cuda, "is_complete", lambda self, event: True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("edge", "nccl"),
    [(edge, FakeLibrary()) for edge in ("record_ready", "wait", "new", "watch")]
    + [(edge, None) for edge in ("record_ready", "wait", "new", "watch", "passed")],
    ids=lambda value: value if isinstance(value, str) else "nccl" if value else "staged",
)
def test_a_missing_edge_is_found(rig: MakeRig, monkeypatch: pytest.MonkeyPatch, edge: str, nccl: Any) -> None:
    without(monkeypatch, edge)
    for seed in range(200):
        try:
            simulate(rig, nccl, seed)
        except AssertionError:
            print(f"seed {seed}")
            return
    pytest.fail(f"200 programs never missed {edge!r}")
