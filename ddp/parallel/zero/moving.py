"""Optimizer state between its two forms: in parts on the ranks, and whole beside each parameter, as others keep it.

A state that has an element for each of a piece's is cut and joined like the parameter. Anything else (a count of
steps) is the same for all pieces of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectives import Communicator
from ddp._device import CPU, device, place
from ddp._tensor.base import TensorBase, wrap
from ddp.errors import StateDictError
from ddp.parallel.zero.ranges import Piece
from ddp.parallel.zero.shard import Shard

Array = Any
Entry = dict[str, Any]  # the state of one parameter, or of a piece of it
Adopt = Callable[[str, Any], Any]  # what becomes of a state of that name


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The state of one bucket on this rank.

    order: the parameters of the bucket by the number of their gradient; entries: of each of the shard's pieces
    """

    shard: Shard
    order: Mapping[int, int]
    entries: Sequence[Entry]

    def pieces(self) -> Iterator[tuple[int, Piece, Entry]]:
        """(parameter, piece, its state) of all that have one."""
        for piece, entry in zip(self.shard.pieces, self.entries, strict=True):
            if entry:
                yield self.order[piece.number], piece, entry


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank says of a state.

    dtype: it has some of the state's elements, of that dtype; None: the state is `value`, the array of a tensor if
    `in_tensor`
    """

    dtype: Any = None
    value: Any = None
    in_tensor: bool = False


def join(
    holdings: Sequence[Holding], resting: Mapping[int, Entry], comm: Communicator, where: device
) -> dict[int, Entry]:
    """The whole state of every parameter that has one, by its number, on every rank. Collective.

    holdings: of each bucket; resting: state of parameters without a bucket, each on one rank
    """
    told = {number: _told(entry, None) for number, entry in resting.items()}
    for holding in holdings:
        told.update({number: _told(entry, piece) for number, piece, entry in holding.pieces()})
    agreed = agree(comm.all_gather_object(told))
    whole: dict[int, Entry] = {
        number: {name: _value(each) for name, each in entry.items()} for number, entry in agreed.items()
    }
    for holding in holdings:
        shard = holding.shard
        kinds = {
            (name, str(each.dtype)): each.dtype
            for number in holding.order.values()
            for name, each in agreed.get(number, {}).items()
            if each.dtype is not None
        }
        for (name, text), dtype in sorted(kinds.items()):
            # As text: NumPy says that None equals the dtype float64.
            having = {number for number, entry in agreed.items() if name in entry and str(entry[name].dtype) == text}
            mine = where.xp.zeros(shard.own.size, dtype)
            for number, piece, entry in holding.pieces():
                if number in having:
                    mine[piece.at : piece.at + piece.stop - piece.start] = _array(entry[name])
            joined = shard.gather(mine, comm)
            for gradient, number in holding.order.items():
                if number in having:
                    whole[number][name] = wrap(shard.cut(joined, gradient), where)
    return whole


def agree(everyones: Sequence[Mapping[int, Mapping[str, Told]]]) -> dict[int, dict[str, Told]]:
    """One answer for each state, in the order of parameters: elements only if all ranks that have it have elements."""
    agreed: dict[int, dict[str, Told]] = {}
    for told in everyones:
        for number, entry in told.items():
            known = agreed.setdefault(number, {})
            for name, each in entry.items():
                if name not in known or (known[name].dtype is not None and each.dtype is None):
                    known[name] = each
    return {number: agreed[number] for number in sorted(agreed)}


def cut(entry: Mapping[str, Any], shape: tuple[int, ...], piece: Piece, adopt: Adopt) -> Entry:
    """The state of a piece of a parameter, from that of the whole, which has passed `check`. shape: the parameter's"""
    found = {}
    for name, value in entry.items():
        if _has_elements(name, value, shape):
            where = value.device if isinstance(value, TensorBase) else CPU
            part = _array(value).reshape(-1)[piece.start : piece.stop]
            found[name] = adopt(name, wrap(part, where))
        else:
            found[name] = adopt(name, value)
    return found


def check(parameter: str, entry: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raises: StateDictError for a state that is neither of the parameter's shape nor one value."""
    for name, value in entry.items():
        array = _array(value)
        if not _has_elements(name, value, shape) and getattr(array, "size", 1) != 1:
            raise StateDictError(f"state {name!r} of shape {array.shape} for {parameter} of shape {shape}")


def _has_elements(name: str, value: Any, shape: tuple[int, ...]) -> bool:
    array = _array(value)
    return name != "step" and hasattr(array, "dtype") and array.shape == shape


def _told(entry: Entry, piece: Piece | None) -> dict[str, Told]:
    """piece: what the state is of; None: of a whole parameter."""
    told = {}
    for name, value in entry.items():
        array = _array(value)
        if not hasattr(array, "dtype"):
            told[name] = Told(value=value)
        elif piece is not None and name != "step" and array.shape == (piece.stop - piece.start,):
            told[name] = Told(dtype=array.dtype)
        else:
            told[name] = Told(value=place(array, CPU), in_tensor=True)
    return told


def _value(told: Told) -> Any:
    return wrap(told.value, CPU) if told.in_tensor else told.value


def _array(value: Any) -> Any:
    return value.array if isinstance(value, TensorBase) else value
