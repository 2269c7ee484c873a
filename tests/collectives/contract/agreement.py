"""What every backend owes of arguments that must be the same on every rank: each of them is compared."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, MismatchError
from tests.collectives.contract.run import assert_usable, on_every_rank

Arguments = dict[str, Any]


def arguments(size: int) -> dict[str, tuple[Arguments, list[Arguments]]]:
    """Each collective with its usual arguments, and with one other value of each that ranks must agree on."""
    x = np.ones((2 * size, 3))
    dtypes: list[Arguments] = [{"x": x.astype(np.float32)}, {"x": x.astype(">f8")}]
    rows: list[Arguments] = [*dtypes, {"x": np.ones((2 * size, 2))}, {"x": np.ones((2 * size, 3, 1))}]
    shapes: list[Arguments] = [*rows, {"x": np.ones((3 * size, 3))}]
    root: list[Arguments] = [{"root": size - 1}]
    uneven = [2 * size] + [0] * (size - 1)
    given: list[Arguments] = [{"lengths": "equal"}, {"lengths": [2 * size] * size}]
    reductions: list[Arguments] = [*shapes, {"op": "mean"}, {"op": "max"}, {"scale": 0.5}, {"scale": lambda: 0.5}]
    return {
        "all_reduce": ({"x": x}, reductions),
        "reduce": ({"x": x}, [*reductions, *root]),
        "reduce_scatter": ({"x": x}, [*reductions, {"lengths": uneven}]),
        "broadcast": ({"x": x.copy()}, [*shapes, *root]),
        "gather": ({"x": x}, [*rows, *root, *given]),
        "all_gather": ({"x": x}, [*rows, *given]),
        "scatter": ({"x": x}, root),
        "all_to_all": ({"x": x}, [*rows, {"lengths": "equal"}, {"lengths": [[2] * size] * size}]),
        "broadcast_object": ({"o": x}, root),
        "gather_object": ({"o": x}, root),
        "scatter_object": ({"objects": [x] * size}, root),
        "empty": ({"shape": 2}, [{"shape": 3}, {"shape": (2, 1)}, {"dtype": np.float64}]),
    }


class AgreementContract:
    """One rank brings another argument than the others."""

    @pytest.mark.parametrize("name", arguments(2))
    @on_every_rank
    def test_an_argument_that_differs_is_an_error_on_every_rank(self, comm: Communicator, name: str) -> None:
        usual, others = arguments(comm.size)[name]
        call = getattr(comm, name)
        for different in others if comm.size > 1 else []:
            mine = {**usual, **different} if comm.rank == comm.size - 1 else usual
            call(**usual)
            with pytest.raises(MismatchError, match=rf"{name} #\d+"):
                call(**mine)
            if name != "empty":
                with pytest.raises(MismatchError, match=rf"{name} #\d+"):
                    call(**mine, async_op=True).wait()
            assert_usable(comm)

    @pytest.mark.parametrize("name", ["gather", "all_gather", "all_to_all"])
    @on_every_rank
    def test_rows_that_are_not_equal_though_lengths_say_so_are_an_error_on_every_rank(
        self, comm: Communicator, name: str
    ) -> None:
        rows = comm.size * (2 if comm.rank == comm.size - 1 else 1)
        for async_op in (False, True) if comm.size > 1 else ():
            call = functools.partial(getattr(comm, name), np.ones((rows, 2)), lengths="equal", async_op=async_op)
            with pytest.raises(MismatchError, match="lengths"):
                call().wait()
        assert_usable(comm)

    @on_every_rank
    def test_another_collective_is_an_error_on_every_rank(self, comm: Communicator) -> None:
        calls = {name: (getattr(comm, name), usual) for name, (usual, _) in arguments(comm.size).items()} | {
            name: (getattr(comm, name), {}) for name in ("barrier", "duplicate")
        }
        calls |= {"split": (comm.split, {"color": 0}), "all_gather_object": (comm.all_gather_object, {"o": 1})}
        names = list(calls)
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            call, how = calls[other if comm.rank == comm.size - 1 else name]
            if comm.size > 1:
                with pytest.raises(MismatchError, match=rf"{name} #\d+"):
                    call(**how)
            assert_usable(comm)
        # Those that could not be made have used up no name.
        twin = comm.duplicate()
        part = comm.split(0)
        assert part is not None
        assert set(comm.all_gather_object((twin.key, part.key))) == {(twin.key, part.key)}
        twin.barrier()
        part.barrier()
