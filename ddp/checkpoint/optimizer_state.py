"""Optimizer state on its way to disk and back: whole, or in the pieces that the ranks of a ZeroOptimizer hold.

Both are saved as (parameter, start, stop, state there), so that either loads into the other, at any number of ranks.
Parameters go by number, as in every optimizer's state dict, with the model's names: these tell an optimizer of another
model from the one that was saved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp._device import CPU
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim import Optimizer
from ddp.parallel import ZeroOptimizer
from ddp.serialization.structure import JSON, Decoder, Keep, encode, names_in

TensorPiece = tuple[int, int, int, dict[str, Any]]


def describe_optimizer(optimizer: Optimizer, names: Mapping[int, str], where: str, keep: Keep) -> JSON:
    """All but the state. names: of the model's parameters, by id; where: what stands before the names of arrays"""
    groups = []
    for group in Optimizer.state_dict(optimizer)["param_groups"]:
        groups.append({name: value for name, value in group.items() if name != "params"})
    params = list(_params(optimizer))
    return {
        "kind": _kind(optimizer),
        "groups": encode(groups, f"{where}.groups", keep),
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "params": [[names.get(id(p)), list(p.shape)] for p in params],
        "rest": encode(
            {key: entry for key, entry in optimizer.state.items() if not isinstance(key, Tensor)}, where, keep
        ),
        "stepped": optimizer._stepped,
    }


def optimizer_pieces(optimizer: Optimizer, names: Mapping[int, str], where: str, keep: Keep) -> JSON:
    """The state that this rank holds: all of it, or in a ZeroOptimizer its part."""
    saved_pieces = []
    params = list(_params(optimizer))
    for number, start, stop, state in _pieces(optimizer):
        p = params[number]
        label = f"{where}.{names.get(id(p), number)}"
        whole = (start, stop) == (0, p.array.size)
        lead = label if whole else f"{label}.{start}-{stop}"
        cut = [name for name, value in state.items() if _has_elements(name, value, (stop - start,), p.shape)]
        saved_pieces.append([number, start, stop, cut, encode(state, lead, keep)])
    return saved_pieces


def tensors_changed_by_step(optimizer: Optimizer) -> Iterator[Any]:
    """The tensors that only `step` changes: the parameters, and their state."""
    yield from _params(optimizer)
    for _, _, _, state in _pieces(optimizer):
        yield from (value for value in state.values() if isinstance(value, TensorBase))


class SavedOptimizer:
    """The state of one optimizer in a checkpoint. saved_pieces: those of each rank"""

    def __init__(self, described: Mapping[str, Any], saved_pieces: Sequence[JSON], arrays: Decoder) -> None:
        self._described = described
        self._arrays = arrays
        self._pieces: dict[int, list[tuple[int, int, list[str], JSON]]] = {}
        for number, start, stop, cut, state in itertools.chain(described["pieces"], *saved_pieces):
            self._pieces.setdefault(number, []).append((start, stop, cut, state))

    def check(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Raises: StateDictError, with names, if this is another optimizer or one of other parameters."""
        saved, kind = self._described, _kind(optimizer)
        if saved["kind"] != kind:
            raise StateDictError(f"the checkpoint has the state of {saved['kind']}, the optimizer is {kind}")
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        mine = [[names.get(id(p)), list(p.shape)] for p in _params(optimizer)]
        for number, (theirs, own) in enumerate(zip(saved["params"], mine, strict=False)):
            if theirs != own:
                raise StateDictError(f"{kind}: parameter {number} is {_words(own)}, in the checkpoint {_words(theirs)}")
        if sizes != saved["sizes"]:
            raise StateDictError(f"{kind} has groups of {sizes} parameters, the checkpoint of {saved['sizes']}")

    def needs(self, optimizer: Optimizer) -> Iterator[str]:
        """The names of the arrays that `load` will fetch on this rank."""
        yield from names_in(self._described["groups"])
        yield from names_in(self._described["rest"])
        if not isinstance(optimizer, ZeroOptimizer):
            yield from names_in([state for pieces in self._pieces.values() for _, _, _, state in pieces])
            return
        for number, first, last in optimizer.state_ranges():
            for _, _, _, state in self._overlapping(number, first, last):
                yield from names_in(state)

    def load(self, optimizer: Optimizer) -> None:
        """Puts it into an optimizer that has passed `check`."""
        groups = self._arrays.decode(self._described["groups"])
        first = 0
        for group, size in zip(groups, self._described["sizes"], strict=True):
            group["params"] = list(range(first, first + size))
            first += size
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.load_state_pieces(groups, self._find)
        else:
            shapes = [tuple(shape) for _, shape in self._described["params"]]
            state: dict[Any, Any] = {number: self._whole(number, shapes[number]) for number in sorted(self._pieces)}
            state.update(self._arrays.decode(self._described["rest"]))
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        optimizer._stepped = bool(self._described["stepped"])

    def _whole(self, number: int, shape: tuple[int, ...]) -> dict[str, Any]:
        pieces = self._pieces[number]
        whole = self._arrays.decode(pieces[0][3]) if len(pieces) == 1 else self._find(number, 0, math.prod(shape))
        for name in pieces[0][2]:
            whole[name] = wrap(whole[name].array.reshape(shape), CPU)
        return dict(whole)

    def _find(self, number: int, first: int, last: int) -> dict[str, Any]:
        """The state of elements first to last of a parameter."""
        found: dict[str, Any] = {}
        for start, stop, cut, saved in self._overlapping(number, first, last):
            begin, end = max(first, start), min(last, stop)
            for name, value in self._arrays.decode(saved).items():
                if name not in cut:
                    found.setdefault(name, value)
                    continue
                if name not in found:
                    found[name] = wrap(CPU.xp.empty(last - first, value.array.dtype), CPU)
                flat = value.array.reshape(-1)[begin - start : end - start]
                found[name].array[begin - first : end - first] = flat
        return found

    def _overlapping(self, number: int, first: int, last: int) -> list[tuple[int, int, list[str], JSON]]:
        pieces = self._pieces.get(number, [])
        return [piece for piece in pieces if first == last or (piece[0] < last and piece[1] > first)]


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


def _has_elements(name: str, value: Any, length: tuple[int, ...], shape: Sequence[int]) -> bool:
    """A state with an element for each of the parameter's is cut like it: see `ddp.parallel.zero.shards`."""
    return name != "step" and isinstance(value, TensorBase) and value.array.shape in (length, tuple(shape))


def _words(param: Sequence[Any]) -> str:
    name, shape = param
    return f"{name or 'no parameter of the model'} {tuple(shape)}"
