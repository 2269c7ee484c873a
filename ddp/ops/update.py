"""The update of parameters by a formula: a short program of elementwise passes over rows of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp.ops.arrays import Array, array_function

# How many elements a pass processes at a time: so few that the next pass finds the result in cache.
TILE = 1 << 15


class Pass(NamedTuple):
    """One call of a NumPy function. inputs, out: register numbers; the input -1 - i stands for scalar i."""

    function: str
    inputs: tuple[int, ...]
    out: int


class Program(NamedTuple):
    """A formula as elementwise passes over numbered registers: first the arrays of a row, then scratch memory."""

    passes: tuple[Pass, ...]
    registers: int


class UpdateRows:
    """Arrays that are updated by one program: each row holds contiguous vectors of one length and one dtype.

    addresses: a cache of the native kernel, None at first: the addresses and sizes of the arrays
    """

    def __init__(self, rows: Sequence[tuple[Array, ...]]) -> None:
        self.arrays = [tuple([array.reshape(-1) for array in row]) for row in rows]
        self.addresses: Any = None


@array_function
def run_program(xp: Any, program: Program, scalars: Array, rows: UpdateRows) -> None:
    """Runs the passes over every row; the result of each pass is rounded. scalars: of the dtype of the arrays."""
    with np.errstate(all="ignore"):  # infinities and nan are valid results, as on a GPU
        for row in rows.arrays:
            _run_row(xp, program, scalars, row)


def _run_row(xp: Any, program: Program, scalars: Array, row: tuple[Array, ...]) -> None:
    for start in range(0, row[0].size, TILE):
        registers = [array[start : start + TILE] for array in row]
        registers += [xp.empty_like(registers[0]) for _ in range(program.registers - len(row))]
        for function, inputs, out in program.passes:
            operands = [registers[i] if i >= 0 else scalars[-1 - i] for i in inputs]
            getattr(xp, function)(*operands, out=registers[out])
