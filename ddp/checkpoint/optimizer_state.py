"""Optimizer state on its way to disk and back: whole, or in the pieces that the ranks of a ZeroOptimizer hold.

Both are saved as (parameter, start, stop, state there), so that either loads into the other, at any number of ranks.
Parameters are saved by number, as in every optimizer's state dict, with the model's names. By these names they are
matched with an optimizer that has them in another order, and an optimizer of another model is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ddp._device import CPU
from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim import Optimizer
from ddp.optim.optimizer import Group, groups_by_name
from ddp.parallel import ZeroOptimizer
from ddp.parallel.zero.shards import array_of, has_elements, wrapped_like
from ddp.serialization.structure import JSON, Keep, encode

TensorPiece = tuple[int, int, int, dict[str, Any]]


def encode_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], where: str, keep: Keep, keep_piece: Keep, rank: int
) -> tuple[dict[str, JSON], list[JSON]]:
    """What is the same on all ranks, and the pieces of the state: a ZeroOptimizer's of each rank, else all of rank 0.

    names: of the model's parameters, by id; where: what stands before the names of arrays
    keep_piece: keeps those of a ZeroOptimizer
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    params = list(_params(optimizer))
    sharded = isinstance(optimizer, ZeroOptimizer)
    pieces: list[JSON] = []
    for number, start, stop, state in _pieces(optimizer):
        p = params[number]
        label = f"{where}.{names.get(id(p), number)}"
        if (start, stop) != (0, p.array.size):
            label += f".{start}-{stop}"
        cut = [name for name, value in state.items() if has_elements(name, value, (stop - start,), p.shape)]
        pieces.append([number, start, stop, cut, encode(state, label, keep_piece if sharded else keep)])
    rest = {key: entry for key, entry in optimizer.state.items() if not isinstance(key, Tensor)}
    described = {
        "kind": _kind(optimizer),
        "groups": encode(groups, f"{where}.groups", keep),
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "params": [[names.get(id(p)), list(p.shape)] for p in params],
        "rest": encode(rest, where, keep),
        "stepped": optimizer._stepped,
    }
    return described, pieces if sharded or rank == 0 else []


def versions_changed_by_step(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the versions of the tensors that only `step` changes: the parameters, and their state."""
    tensors: list[Any] = []
    for optimizer in optimizers:
        tensors += _params(optimizer)
        tensors += (value for piece in _pieces(optimizer) for value in piece[3].values())
    return {id(each.version) for each in tensors if isinstance(each, TensorBase)}


class SavedOptimizer:
    """The state of one optimizer in a checkpoint.

    pieces: of each rank; read: decodes what `encode` returned
    """

    def __init__(
        self, described: Mapping[str, Any], pieces: Iterable[Iterable[JSON]], read: Callable[[JSON], Any]
    ) -> None:
        self._described, self._read = described, read
        self._pieces: dict[int, list[_SavedPiece]] = {}
        for number, *piece in itertools.chain(*pieces):
            self._pieces.setdefault(number, []).append(_SavedPiece(*piece))

    def check(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Raises: StateDictError, with names, if this is another optimizer or one of other parameters."""
        saved, kind = self._described, _kind(optimizer)
        if saved["kind"] != kind:
            raise StateDictError(f"the checkpoint has the state of {saved['kind']}, the optimizer is {kind}")
        own = [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
        groups: list[Group] = self._read(saved["groups"])
        params = enumerate(saved["params"])
        for group, size in zip(groups, saved["sizes"], strict=True):
            group["params"] = list(itertools.islice(params, size))
            group["param_names"] = [str(name) for _, (name, _) in group["params"]]
        matched = groups_by_name([[str(name) for name, _ in group] for group in own], groups)
        self._groups = matched or groups
        in_own_order = [param for group in self._groups for _, param in group["params"]]
        for number, (theirs, mine) in enumerate(zip(in_own_order, itertools.chain(*own), strict=False)):
            if theirs != mine:
                raise StateDictError(
                    f"{kind}: parameter {number} is {_words(mine)}, in the checkpoint {_words(theirs)}"
                )
        if matched is None:
            sizes = [len(group) for group in own]
            raise StateDictError(f"{kind} has groups of {sizes} parameters, the checkpoint of {saved['sizes']}")

    def load(self, optimizer: Optimizer) -> None:
        """Puts it into an optimizer that has passed `check`. Reads no more than this rank will hold."""
        saved = self._described
        shapes = [tuple(p.shape) for p in _params(optimizer)]
        pieces_of = [self._pieces.get(number, []) for group in self._groups for number, _ in group["params"]]
        if isinstance(optimizer, ZeroOptimizer):
            ranges = list(optimizer.state_ranges())
        else:
            ranges = [(number, 0, math.prod(shape)) for number, shape in enumerate(shapes) if pieces_of[number]]
        wanted = {at[0]: [each for each in pieces_of[at[0]] if each.overlaps(*at[1:])] for at in ranges}
        states = [[each.state for each in pieces] for pieces in wanted.values()]
        rest, states = self._read([saved["rest"], states])
        loaded = {
            number: [piece._replace(state=state) for piece, state in zip(pieces, mine, strict=True)]
            for (number, pieces), mine in zip(wanted.items(), states, strict=True)
        }
        numbers = itertools.count()
        for group in self._groups:
            group["params"] = [next(numbers) for _ in group["params"]]
            del group["param_names"]  # the model's; the optimizer keeps its own
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.load_state_pieces(self._groups, lambda number, *at: _joined(loaded[number], *at))
        else:
            state: dict[Any, Any] = {at[0]: _joined(loaded[at[0]], *at[1:], shapes[at[0]]) for at in ranges}
            optimizer.load_state_dict({"state": {**state, **rest}, "param_groups": self._groups})
        optimizer._stepped = bool(saved["stepped"])


class _SavedPiece(NamedTuple):
    """The state of elements start to stop of a parameter. cut: the names of what has an element for each of them"""

    start: int
    stop: int
    cut: Sequence[str]
    state: Any

    def overlaps(self, first: int, last: int) -> bool:
        return first == last or (self.start < last and self.stop > first)


def _joined(pieces: Sequence[_SavedPiece], first: int, last: int, shape: Sequence[int] = (-1,)) -> dict[str, Any]:
    """The state of elements first to last of a parameter, of the pieces that overlap with them."""
    found: dict[str, Any] = {}
    for start, stop, cut, state in pieces:
        begin, end = max(first, start), min(last, stop)
        for name, value in state.items():
            if name not in cut or (start, stop) == (first, last):
                found.setdefault(name, value)
                continue
            if name not in found:
                found[name] = wrapped_like(value, CPU.xp.empty(last - first, array_of(value).dtype))
            flat = array_of(value).reshape(-1)[begin - start : end - start]
            array_of(found[name])[begin - first : end - first] = flat
    for name in {name for piece in pieces for name in piece.cut}:
        found[name] = wrapped_like(found[name], array_of(found[name]).reshape(shape))
    return found


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _kind(optimizer: Optimizer) -> str:
    return (optimizer._kind if isinstance(optimizer, ZeroOptimizer) else type(optimizer)).__name__


def _pieces(optimizer: Optimizer) -> Iterator[TensorPiece]:
    if isinstance(optimizer, ZeroOptimizer):
        yield from optimizer.state_pieces()
        return
    state = optimizer.state
    for number, p in enumerate(_params(optimizer)):
        if p in state:
            yield number, 0, p.array.size, state[p]


def _words(param: Sequence[Any]) -> str:
    name, shape = param
    return f"{name or 'no parameter of the model'} {tuple(shape)}"
