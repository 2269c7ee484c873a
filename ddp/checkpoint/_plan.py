"""What a rank says before it writes, checked so that nothing comes to light when half of the files are on the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ddp.checkpoint import _folders
from ddp.checkpoint._manifest import Part
from ddp.checkpoint._shards import Array
from ddp.checkpoint._trouble import Failed
from ddp.serialization._format import METADATA
from ddp.serialization._layout import CODES

#: (start, stop, shape): elements start to stop of a tensor of that shape, in C order
PieceOf = tuple[int, int, tuple[int, ...]]


class Plan(NamedTuple):
    """state: JSON of rank 0's, empty elsewhere; own_state: JSON"""

    step: int
    parts: dict[str, Part]
    state: str
    own_state: str


def plan(
    step: int, tensors: Mapping[str, Array], state: Any, own_state: Any, pieces: Mapping[str, PieceOf], rank: int
) -> Plan:
    """What this rank is to write. Raises: Failed if it cannot be written."""
    if type(step) is not int or not 0 <= step < _folders.MOST_STEPS:
        raise Failed(f"a step should be an int of at least 0, is {step!r}")
    if unknown := pieces.keys() - tensors.keys():
        raise Failed(f"there are pieces of {', '.join(map(repr, sorted(unknown)))}, which are not among the tensors")
    parts = {name: _part(name, array, pieces.get(name)) for name, array in tensors.items()}
    return Plan(step, parts, "" if rank else to_json("state", state), to_json("own_state", own_state))


def _part(name: str, array: Any, piece: PieceOf | None) -> Part:
    if not isinstance(name, str) or name == METADATA or not _is_unicode(name):
        raise Failed(f"{name!r:.80} is no name for a tensor")
    if not isinstance(array, np.ndarray) or array.dtype not in CODES:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise Failed(f"{name} should be a NumPy array of {', '.join(map(str, CODES))}, is of {kind}")
    if piece is None:
        return Part(CODES[array.dtype], array.shape, 0, array.size)
    start, stop, shape = piece
    if not 0 <= start <= stop <= math.prod(shape) or array.shape != (stop - start,):
        raise Failed(f"{name}: an array of shape {array.shape} is not elements {start} to {stop} of {tuple(shape)}")
    return Part(CODES[array.dtype], tuple(shape), start, stop)


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(where: str, value: Any) -> str:
    """A JSON value as text; NaN and infinities are what Python's `json` makes of them. Raises: Failed for others."""
    try:
        _check_json(where, value)
        return json.dumps(value)
    except RecursionError:
        raise Failed(f"{where} contains itself, or is nested too deep") from None


def _check_json(where: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise Failed(f"{where} has a key of type {type(key).__name__}: those of JSON are str")
            _check_json(f"{where}[{key!r}]", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_json(f"{where}[{index}]", each)
    elif value is not None and type(value) not in (str, bool, int, float):
        raise Failed(f"{where} is of type {type(value).__name__}: expected JSON values")
