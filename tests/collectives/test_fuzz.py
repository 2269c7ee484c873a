"""Random sequences of collectives on simulated ranks, against NumPy on all ranks' inputs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import collectives
from collectives import Communicator

DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.complex128]
NAMES = ["all_reduce", "reduce", "broadcast", "gather", "all_gather", "scatter", "barrier"]
NAMES += ["reduce_scatter", "all_to_all", "ring", "broadcast_object", "gather_object", "all_gather_object"]
NAMES += ["scatter_object"]
REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def draw(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """One collective with every rank's input; all ranks draw the same."""
    name = rng.choice(NAMES)
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    rows = tuple(rng.integers(0, 4, rng.integers(0, 3)))
    uneven = name in ("gather", "all_gather", "all_to_all", "ring")
    lengths = rng.integers(0, 4, size) if uneven else [int(rng.integers(0, 6))] * size
    inputs = []
    for length in lengths:
        shape = (int(length), *map(int, rows))
        whole = rng.integers(-8, 8, (*shape[:-1], 2 * shape[-1])).astype(dtype)
        strided = rng.integers(2)
        inputs.append(whole[..., ::2] if strided else np.ascontiguousarray(whole[..., : shape[-1]]))
    ops = ["sum", "prod"] if dtype.kind == "c" else list(REDUCE)
    if dtype.kind in "iu":
        ops.remove("mean")  # its own test says what it is
    return {
        "name": str(name),
        "inputs": inputs,
        "op": str(rng.choice(ops)),
        "root": int(rng.integers(size)),
        "known": bool(rng.integers(2)),
        "async": bool(rng.integers(2)),
        "lengths": [len(x) for x in inputs],
        "parts": [divide(rng, len(x), size) for x in inputs],
        "tag": int(rng.integers(3)),
    }


def divide(rng: np.random.Generator, n: int, size: int) -> list[int]:
    """n rows, divided among the ranks at random."""
    return [int(each) for each in rng.multinomial(n, [1 / size] * size)]


def call(comm: Communicator, drawn: dict[str, Any]) -> Any:
    x = drawn["inputs"][comm.rank].copy(order="K")
    options: dict[str, Any] = {"async_op": drawn["async"]}
    name = drawn["name"]
    if name == "barrier":
        return comm.barrier(**options)
    if name == "all_reduce":
        return comm.all_reduce(x, drawn["op"], **options)
    if name == "reduce":
        return comm.reduce(x, drawn["op"], drawn["root"], **options)
    if name == "broadcast":
        return comm.broadcast(x, drawn["root"], **options)
    if name == "scatter":
        return comm.scatter(x, drawn["root"], **options)
    if name == "reduce_scatter":
        return comm.reduce_scatter(x, drawn["op"], lengths=drawn["parts"][0] if drawn["known"] else None, **options)
    if name == "all_to_all":
        return comm.all_to_all(x, lengths=[drawn["parts"][comm.rank], drawn["parts"]][drawn["known"]], **options)
    if name == "ring":
        sent = comm.send(x, (comm.rank + 1) % comm.size, tag=drawn["tag"], async_op=True)
        got = comm.recv((comm.rank - 1) % comm.size, tag=drawn["tag"], **options)
        sent.wait(timeout=20)
        return got
    if name == "broadcast_object":
        return comm.broadcast_object(x, drawn["root"], **options)
    if name == "gather_object":
        return comm.gather_object(x, drawn["root"], **options)
    if name == "all_gather_object":
        return comm.all_gather_object(x, **options)
    if name == "scatter_object":
        return comm.scatter_object(drawn["inputs"] if comm.rank == drawn["root"] else None, drawn["root"], **options)
    lengths = drawn["lengths"] if drawn["known"] else None
    if name == "gather":
        return comm.gather(x, drawn["root"], lengths=lengths, **options)
    return comm.all_gather(x, lengths=lengths, **options)


def expected(drawn: dict[str, Any], rank: int) -> Any:
    inputs, name, root = drawn["inputs"], drawn["name"], drawn["root"]
    if name == "barrier" or (name in ("reduce", "gather", "gather_object") and rank != root):
        return None
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        wide = np.float64 if inputs[0].dtype == np.float16 else inputs[0].dtype
        with np.errstate(over="ignore"):
            total = REDUCE[drawn["op"]](np.stack(inputs).astype(wide), axis=0).astype(inputs[0].dtype)
        if name != "reduce_scatter":
            return total
        return cut(total, drawn["parts"][0])[rank] if drawn["known"] else np.array_split(total, len(inputs))[rank]
    if name == "all_to_all":
        return np.concatenate([cut(x, parts)[rank] for x, parts in zip(inputs, drawn["parts"], strict=True)])
    if name == "ring":
        return inputs[rank - 1]
    if name == "broadcast_object":
        return inputs[root]
    if name in ("gather_object", "all_gather_object"):
        return inputs
    if name == "scatter_object":
        return inputs[rank]
    if name == "broadcast":
        return inputs[root]
    if name == "scatter":
        return np.array_split(inputs[root], len(inputs))[rank]
    return np.concatenate(inputs)


def cut(x: np.ndarray[Any, Any], parts: list[int]) -> list[np.ndarray[Any, Any]]:
    return np.split(x, np.cumsum(parts)[:-1])


def check(drawn: dict[str, Any], got: Any, want: Any, seed: int) -> None:
    if want is None:
        assert got is None
    elif isinstance(want, list):
        for one, other in zip(got, want, strict=True):
            check(drawn, one, other, seed)
    else:
        assert got.dtype == want.dtype
        exact = "reduce" not in drawn["name"] or got.dtype.kind in "iu"
        compare = assert_array_equal if exact else lambda a, b, **kw: assert_allclose(a, b, rtol=1e-3, **kw)
        compare(got, want, err_msg=f"seed {seed}: {drawn['name']} {drawn['op']}")


def test_random_sequences(count: Callable[[int, int], int]) -> None:
    sequences = count(300, 10_000)  # of five calls each
    for seed in range(sequences):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(1, 5))
        plan = [draw(rng, size) for _ in range(5)]

        def rank(comm: Communicator, plan: list[dict[str, Any]] = plan, seed: int = seed) -> None:
            results = [call(comm, drawn) for drawn in plan]
            for drawn, result in zip(plan, results, strict=True):
                got = result.wait(timeout=20) if drawn["async"] else result
                check(drawn, got, expected(drawn, comm.rank), seed)

        collectives.run_threads(rank, size, timeout=20)
