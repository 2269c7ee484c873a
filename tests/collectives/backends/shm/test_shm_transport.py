"""Random sequences of all calls with lengths around every border: the same bits as ranks that share nothing.

Ranks are late at random, before each thing that another rank waits for and after it, so that a place which is written
while somebody may still read it gives other numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.backends.shm.control_block import INLINE_BYTES, STAGING_BYTES, ControlBlock
from tests.collectives.backends.shm.ranks import run_sharing

pytestmark = pytest.mark.timeout(400)  # with --long

Array = np.ndarray[Any, Any]
POOL = 3 << 20  # bytes of each array that ranks share
DTYPES = ["f4", "f8", "i1", "i4", "f2", "c8"]
NAMES = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "gather", "all_gather", "scatter", "all_to_all"]
NAMES += ["barrier", "all_gather_object"]


def draw(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """One call and what each rank does for it; all ranks draw the same."""
    dtype = np.dtype(str(rng.choice(DTYPES)))
    borders = [
        0,
        INLINE_BYTES,
        STAGING_BYTES,
        STAGING_BYTES // size,
        2 * STAGING_BYTES,
        INLINE_BYTES - 8 * size,
        3 * STAGING_BYTES // 2,
    ]
    name = str(rng.choice(NAMES))
    uneven = name in ("gather", "all_gather", "all_to_all")

    def length() -> int:
        return max(0, int(rng.choice(borders)) // dtype.itemsize + int(rng.integers(-3, 4)))

    lengths = [length() for _ in range(size)] if uneven else [length()] * size
    outs = {"all_reduce": ["none", "x", "private", "shared"], "reduce_scatter": ["none", "private", "shared"]}
    outs["all_gather"] = outs["reduce_scatter"]
    alike = bool(rng.integers(2))  # all ranks bring the same kind of memory, or each its own

    def kinds(choices: list[str]) -> list[str]:
        return [str(rng.choice(choices))] * size if alike else [str(each) for each in rng.choice(choices, size)]

    return {
        "name": name,
        "dtype": dtype,
        "lengths": lengths,
        "op": str(rng.choice(["sum", "prod"] if dtype.kind == "c" else ["sum", "max", "mean"])),
        "scale": [None, 0.5][rng.integers(2)] if dtype.kind in "fc" else None,
        "root": int(rng.integers(size)),
        "x": kinds(["private", "shared"]),
        "out": kinds(outs.get(name, ["none"])),
        "at": [int(at) * 64 for at in rng.integers(0, 100, size)],
        "async": bool(rng.integers(4) == 0),
        "again": int(rng.integers(1, 4)),
        "late": float(rng.random() * 1e-3),
        "seed": int(rng.integers(2**31)),
    }


def room(kind: str, pool: Array, at: int, length: int, dtype: np.dtype[Any]) -> Array:
    if kind == "private":
        return np.zeros(length, dtype)
    return pool[at : at + length * dtype.itemsize].view(dtype)


def call(comm: Communicator, drawn: dict[str, Any], pools: list[Array]) -> list[bytes]:
    """What this rank got and what its x is afterwards, for each time that it made the call."""
    dtype, lengths, root, name = drawn["dtype"], drawn["lengths"], drawn["root"], drawn["name"]
    me = comm.rank
    kind, at = drawn["out"][me], drawn["at"][me]
    given = np.random.default_rng([drawn["seed"], me])
    results = []
    x = room(drawn["x"][me], pools[0], at, lengths[me], dtype)
    for _ in range(drawn["again"]):
        x[...] = given.integers(-100, 100, lengths[me]) * (1 if dtype.kind == "i" else 0.7)
        if random.random() < 0.5:
            time.sleep(drawn["late"] * random.random())
        options: dict[str, Any] = {"async_op": drawn["async"]}
        if name in ("all_reduce", "reduce", "reduce_scatter"):
            options.update(op=drawn["op"], scale=drawn["scale"])
        if name in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = root
        if kind == "x":
            options["out"] = x
        elif kind != "none":
            shares = {"all_reduce": lengths[me], "all_gather": sum(lengths)}
            length = shares.get(name, len(np.array_split(x, comm.size)[me]))
            options["out"] = room(kind, pools[1], at, length, dtype)
        if name == "barrier":
            result = comm.barrier(async_op=drawn["async"])
        elif name == "scatter":
            result = comm.scatter(x if me == root else None, **options)
        else:
            result = getattr(comm, name)(x, **options)
        if drawn["async"]:
            result = result.wait(timeout=20)
        assert options.get("out") is None or result is options["out"]
        results += [str(result).encode() if isinstance(result, list) else b"" if result is None else result.tobytes()]
        results += [x.tobytes()]
    return results


def late(method: Callable[[ControlBlock], Any]) -> Callable[[ControlBlock], Any]:
    def act(control: ControlBlock, *args: Any) -> Any:
        if random.random() < 0.1:
            time.sleep(random.random() * 3e-4)
        result = method(control, *args)
        if random.random() < 0.1:
            time.sleep(random.random() * 3e-4)
        return result

    return act


@pytest.fixture(params=["prompt", "late"])
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "late":
        for name in ("publish", "met", "advance", "advanced", "turn"):
            monkeypatch.setattr(ControlBlock, name, late(getattr(ControlBlock, name)))


def run_plan(plan: list[dict[str, Any]]) -> Callable[[Communicator], list[list[bytes]]]:
    def rank(comm: Communicator) -> list[list[bytes]]:
        pools = [comm.empty(POOL, np.uint8) for _ in range(2)]
        return [call(comm, drawn, pools) for drawn in plan]

    return rank


@pytest.mark.usefixtures("lateness")
def test_sharing_makes_no_difference_to_a_single_bit(count: Callable[[int, int], int]) -> None:
    for seed in range(count(12, 200)):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(2, 6))
        plan = [draw(rng, size) for _ in range(12)]
        want = collectives.run_threads(run_plan(plan), size, timeout=20)
        got = run_sharing(run_plan(plan), [0] * size)
        for rank in range(size):
            for drawn, one, other in zip(plan, got[rank], want[rank], strict=True):
                assert one == other, f"seed {seed} rank {rank} of {size}: {drawn}"


def exact(plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a plan whose result does not depend on the order in which values are combined."""
    return [drawn for drawn in plan if drawn["dtype"].kind == "i" or "reduce" not in drawn["name"]]


@pytest.mark.usefixtures("lateness")
def test_nor_do_nodes(count: Callable[[int, int], int]) -> None:
    for seed in range(count(8, 200)):
        rng = np.random.default_rng([seed, 1])
        size = int(rng.integers(3, 6))
        nodes = [int(node) for node in rng.integers(0, 3, size)]
        plan = exact([draw(rng, size) for _ in range(12)])
        want = collectives.run_threads(run_plan(plan), size, timeout=20)
        got = run_sharing(run_plan(plan), nodes)
        for rank in range(size):
            for drawn, one, other in zip(plan, got[rank], want[rank], strict=True):
                assert one == other, f"seed {seed} rank {rank} on nodes {nodes}: {drawn}"
