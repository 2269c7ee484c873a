"""Random calls against NumPy on all ranks' inputs at once.

Every rank chooses for itself how its arrays lie in memory, whether it waits for the call, and whether and where it
takes the result: these choices are no part of what ranks must agree on. Values are small whole numbers, so that every
order of combining them gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal

from collectives import Communicator
from collectives.reduction import BFLOAT16
from tests.collectives.contract.run import Run

Array = np.ndarray[Any, Any]
BLOCK = 25  # calls of one world, of which some are under way at once
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G"]
DTYPES += [">i2", ">i4", ">u8", ">f2", ">f8", ">c8", BFLOAT16]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter"]
MOVEMENTS = ["broadcast", "gather", "all_gather", "scatter", "all_to_all", "ring"]
OBJECTS = ["broadcast_object", "gather_object", "all_gather_object", "scatter_object"]
REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
OPS = {"b": ["max", "min"], "c": ["sum", "mean", "prod"]}
LAYOUTS = ["plain", "strided", "fortran", "reversed", "unaligned"]


def laid_out(values: Array, layout: str) -> Array:
    """An array of its own with these values, which lies in memory as `layout` says."""
    if layout == "unaligned":
        array = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    elif layout == "strided":
        array = np.zeros((*values.shape, 2), values.dtype)[..., 0]
    elif layout == "reversed":
        array = np.zeros_like(values, order="C")[(..., *(slice(None, None, -1),) * values.ndim)]
    else:
        array = np.zeros_like(values, order="F" if layout == "fortran" else "C")
    array[...] = values
    return array


def draw(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """One call, with every rank's input and choices; all ranks draw the same."""
    name = str(rng.choice([*REDUCTIONS, *REDUCTIONS, *MOVEMENTS, *OBJECTS, "barrier"]))
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    kind = "f" if dtype == BFLOAT16 else dtype.kind
    row = tuple(int(n) for n in rng.integers(0, 4, rng.integers(0, 3)))
    # Some are beyond what travels with a signature; and MPIs have other ways from 64 KiB on.
    longest = int(rng.choice([6, 6, 6, 3000, 40_000])) if row == () else 6
    lengths = rng.integers(0, longest, size)
    if name in REDUCTIONS or name in ("broadcast", "scatter"):
        lengths[:] = lengths[0]
    scalar = name in ("all_reduce", "reduce", "broadcast") and rng.random() < 0.05
    inputs = []
    for length in lengths:
        shape = () if scalar else (int(length), *row)
        values = rng.integers(0 if kind in "bu" else -8, 2 if kind == "b" else 8, shape)
        inputs.append(np.asarray(values).astype(dtype))
        if kind in "iu" and values.size and rng.integers(2):  # sums of these wrap around
            limit = getattr(np.iinfo(dtype), str(rng.choice(["min", "max"])))
            inputs[-1].reshape(-1)[:: int(rng.integers(1, 4))] = limit
    places = ["none", "none", *LAYOUTS]
    return {
        "name": name,
        "inputs": inputs,
        "layouts": [str(each) for each in rng.choice(LAYOUTS, size)],
        "outs": [str(each) for each in rng.choice([*places, "x", "x"] if name == "all_reduce" else places, size)],
        "op": str(rng.choice(OPS.get(kind, list(REDUCE)))),
        "scale": 0.5 if kind in "fc" and rng.integers(2) else None,
        "root": int(rng.integers(size)),
        "known": bool(rng.integers(2)),
        "async": [bool(each) for each in rng.integers(2, size=size)],
        "parts": [divide(rng, len(x) if x.ndim else 0, size) for x in inputs],
        "tag": int(rng.integers(3)),
    }


def divide(rng: np.random.Generator, n: int, size: int) -> list[int]:
    """n rows, divided among the ranks at random."""
    return [int(each) for each in rng.multinomial(n, [1 / size] * size)]


def begin(comm: Communicator, drawn: dict[str, Any], want: Any) -> Callable[[], None]:
    """Makes this rank's call. Returns: what waits for the result, and looks at all that the call may have written."""
    name = drawn["name"]
    root = drawn["root"]
    parts = drawn["parts"]
    me = comm.rank
    values = drawn["inputs"][me]
    x = laid_out(values, drawn["layouts"][me])
    options: dict[str, Any] = {"async_op": drawn["async"][me]}
    if name in ("reduce", "broadcast", "gather", "scatter", "broadcast_object", "gather_object", "scatter_object"):
        options["root"] = root
    if name in REDUCTIONS:
        options.update(op=drawn["op"], scale=drawn["scale"])
    if name in ("gather", "all_gather") and drawn["known"]:
        options["lengths"] = [len(each) for each in drawn["inputs"]]
    if name == "reduce_scatter" and drawn["known"]:
        options["lengths"] = parts[0]
    if name == "scatter" and drawn["known"] and me == root:
        options["lengths"] = parts[root]
    if name == "all_to_all":
        options["lengths"] = parts if drawn["known"] else parts[me]
    out = None
    if drawn["outs"][me] != "none" and isinstance(want, np.ndarray) and name not in (*OBJECTS, "broadcast"):
        out = x if drawn["outs"][me] == "x" else laid_out(np.ones_like(want), drawn["outs"][me])
        options["out"] = out
    if out is not x and name != "broadcast":
        x.flags.writeable = False

    sent = None
    if name == "barrier":
        result = comm.barrier(**options)
    elif name == "ring":
        sent = comm.send(x, (me + 1) % comm.size, tag=drawn["tag"], async_op=True)
        result = comm.recv((me - 1) % comm.size, tag=drawn["tag"], **options)
    elif name == "scatter_object":
        result = comm.scatter_object(drawn["inputs"] if me == root else None, **options)
    else:  # pickle has ideas of its own about strided arrays
        result = getattr(comm, name)(values if name in OBJECTS else x, **options)

    def end() -> None:
        got = result.wait(timeout=20) if options["async_op"] else result
        if sent is not None:
            sent.wait(timeout=20)
        assert out is None or got is out
        assert name != "broadcast" or got is x
        same(got, want)
        if out is not x and name != "broadcast":
            same(x, values)

    return end


def expected(drawn: dict[str, Any], rank: int) -> Any:
    inputs = drawn["inputs"]
    name = drawn["name"]
    root = drawn["root"]
    parts = drawn["parts"]
    if name == "barrier" or (name in ("reduce", "gather", "gather_object") and rank != root):
        return None
    if name in REDUCTIONS:
        total = reduced(inputs, drawn["op"], drawn["scale"])
        if name != "reduce_scatter":
            return total
        return cut(total, parts[0])[rank] if drawn["known"] else np.array_split(total, len(inputs))[rank]
    if name == "all_to_all":
        return joined([cut(x, each)[rank] for x, each in zip(inputs, parts, strict=True)])
    if name == "scatter":
        whole = inputs[root]
        return cut(whole, parts[root])[rank] if drawn["known"] else np.array_split(whole, len(inputs))[rank]
    if name in ("gather_object", "all_gather_object"):
        return inputs
    if name in ("broadcast", "broadcast_object"):
        return inputs[root]
    if name == "ring":
        return inputs[rank - 1]
    return inputs[rank] if name == "scatter_object" else joined(inputs)


def reduced(inputs: list[Array], op: str, scale: float | None) -> Array:
    """What `collectives.reduction` says that a reduction of these is."""
    dtype = inputs[0].dtype
    wide = np.dtype(np.float32) if dtype in (np.float16, BFLOAT16) else dtype.newbyteorder("=")
    if op == "mean" and dtype.kind in "iu" and dtype.itemsize < 8:
        wide = np.dtype(np.int64)
    total = np.asarray(REDUCE[op](np.stack(inputs).astype(wide), axis=0)).astype(wide)  # sums of short ones wrap around
    if op == "mean":
        n = len(inputs)
        # fmod has the sign of the total, so that what is left divides toward zero.
        total = (total - np.fmod(total, n)) // n if wide.kind in "iu" else total / wide.type(n)
    if scale is not None:
        total = total * wide.type(scale)
    return np.asarray(total).astype(dtype)


def joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays).astype(arrays[0].dtype)  # which has turned the bytes of foreign ones round


def cut(x: Array, parts: list[int]) -> list[Array]:
    return np.split(x, np.cumsum(parts)[:-1])


def same(got: Any, want: Any) -> None:
    if isinstance(want, list):
        for one, other in zip(got, want, strict=True):
            same(one, other)
    elif want is None:
        assert got is None
    else:
        assert got.dtype == want.dtype
        assert_array_equal(got, want)


def make_calls(comm: Communicator, calls: int, seed: int) -> None:
    """Makes random calls, a few of them at once."""
    rng = np.random.default_rng(seed)
    ends: list[tuple[int, dict[str, Any], Callable[[], None]]] = []
    for number in range(calls):
        drawn = draw(rng, comm.size)
        ends.append((number, drawn, begin(comm, drawn, expected(drawn, comm.rank))))
        if len(ends) == 5 or number == calls - 1:
            for at, each, end in ends:
                try:
                    end()
                except AssertionError as error:
                    words = {**each, "inputs": [(x.dtype, x.shape) for x in each["inputs"]]}
                    raise AssertionError(f"seed {seed} call {at} rank {comm.rank}: {words}\n{error}") from error
            ends.clear()


class RandomContract:
    """Every collective, with random arguments."""

    def test_random_calls(self, run: Run, count: Callable[[int, int], int]) -> None:
        for seed in range(count(2, 80)):
            run(functools.partial(make_calls, calls=BLOCK, seed=seed))
