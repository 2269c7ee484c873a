"""Saves and restores optimizer state, of ordinary optimizers and of the pieces that the ranks of a ZeroOptimizer hold.

Both are saved as (parameter, start, stop, state of these elements), so that either can be loaded into the other, on any
number of ranks. Parameters are saved by number, as in every optimizer's state dict, together with their names in the
model. An optimizer may have its parameters in another order: they are matched by name. If the names differ, as in
another model, the state is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddp._device import CPU
from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim import Optimizer
from ddp.optim.optimizer import Group, groups_by_name
from ddp.parallel import ZeroOptimizer
from ddp.parallel.zero.shards import StatePiece, array_of, has_elements, piece_shape, wrapped_like
from ddp.serialization.structure import JSON, Keep, encode


def encode_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], prefix: str, keep: Keep, keep_piece: Keep, rank: int
) -> tuple[dict[str, JSON], list[JSON]]:
    """Encodes an optimizer. Returns what is equal on all ranks, and the pieces of its state that this rank saves.

    Every rank saves its pieces of a ZeroOptimizer. The state of any other optimizer is equal on all ranks: every
    rank passes its arrays to `keep`, and only rank 0 returns its JSON as pieces.
    names: of the model's parameters, by id; prefix: of the arrays' names
    keep_piece: `keep` for the arrays of a ZeroOptimizer's pieces
    rank: this rank's number among the ranks that together save what is equal on all ranks
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    params = list(_params(optimizer))
    sharded = isinstance(optimizer, ZeroOptimizer)
    pieces: list[JSON] = []
    for number, start, stop, state in _pieces(optimizer):
        p = params[number]
        label = f"{prefix}.{names.get(id(p), number)}"
        if (start, stop) != (0, p.array.size):
            label += f".{start}-{stop}"
        if sharded and start == stop:  # several ranks may have the state of an empty parameter
            label += f".{rank}"
        shape = piece_shape(p, stop - start) if sharded else p.shape
        elementwise = [name for name, value in state.items() if has_elements(name, value, shape)]
        pieces.append([number, start, stop, elementwise, encode(state, label, keep_piece if sharded else keep)])
    rest = {key: entry for key, entry in optimizer.state.items() if not isinstance(key, Tensor)}
    described = {
        "kind": _kind(optimizer),
        "groups": encode(groups, f"{prefix}.groups", keep),
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "params": _describe_params(params, names),
        "rest": encode(rest, prefix, keep),
        "stepped": optimizer._stepped,
    }
    return described, pieces if sharded or rank == 0 else []


def versions_changed_by_step(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the versions of all tensors that only `step` changes: the parameters and their state."""
    tensors: list[Any] = []
    for optimizer in optimizers:
        tensors += _params(optimizer)
        tensors += (value for piece in _pieces(optimizer) for value in piece[3].values())
    return {id(tensor.version) for tensor in tensors if isinstance(tensor, TensorBase)}


class SavedOptimizer:
    """The state of one optimizer in a checkpoint.

    described: the first of the two results of `encode_optimizer`, equal on all ranks; pieces: for each rank, the second
    read: decodes a JSON value, with its arrays
    """

    def __init__(
        self, described: Mapping[str, Any], pieces: Iterable[Iterable[JSON]], read: Callable[[JSON], Any]
    ) -> None:
        self._described = described
        self._read = read
        # By the parameter's number: lists of [start, stop, names of states with one value for each element, state].
        self._pieces: dict[int, list[list[JSON]]] = {}
        for number, *piece in itertools.chain(*pieces):
            known = self._pieces.setdefault(number, [])
            # In a state in memory, each node has a copy of what is equal on all ranks.
            if piece[:2] not in (other[:2] for other in known):
                known.append(piece)

    def check(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Checks that the optimizer's class has the saved name, and that the parameters are the same.

        Raises: StateDictError, naming the first difference, if not.
        """
        saved = self._described
        kind = _kind(optimizer)
        if saved["kind"] != kind:
            raise StateDictError(f"the checkpoint has the state of {saved['kind']}, the optimizer is {kind}")
        params = [_describe_params(group["params"], names) for group in optimizer.param_groups]
        groups: list[Group] = self._read(saved["groups"])
        saved_params = enumerate(saved["params"])
        for group, size in zip(groups, saved["sizes"], strict=True):
            group["params"] = list(itertools.islice(saved_params, size))
            group["param_names"] = [str(name) for _, (name, _) in group["params"]]
        matched = groups_by_name([[str(name) for name, _ in group] for group in params], groups)
        self._groups = matched or groups
        in_order = [param for group in self._groups for _, param in group["params"]]
        for number, (saved_param, param) in enumerate(zip(in_order, itertools.chain(*params), strict=False)):
            if saved_param != param:
                raise StateDictError(
                    f"{kind}: parameter {number} is {_describe(*param)}, in the checkpoint {_describe(*saved_param)}"
                )
        if matched is None:
            sizes = [len(group) for group in params]
            raise StateDictError(f"{kind} has groups of {sizes} parameters, the checkpoint of {saved['sizes']}")

    def load(self, optimizer: Optimizer) -> None:
        """Loads the state into an optimizer for which `check` has been called.

        Reads only the pieces that overlap with the elements whose state this rank will hold. With a ZeroOptimizer these
        are elements of its shards; otherwise they are all elements.
        """
        saved = self._described
        params = list(_params(optimizer))
        pieces_of = [self._pieces.get(number, []) for group in self._groups for number, _ in group["params"]]
        if isinstance(optimizer, ZeroOptimizer):
            ranges = list(optimizer.state_ranges())
        else:
            ranges = [(number, 0, p.array.size) for number, p in enumerate(params) if pieces_of[number]]
        wanted = []
        for number, first, last in ranges:
            needed = pieces_of[number]
            if first < last:
                needed = [piece for piece in needed if piece[0] < last and piece[1] > first]
            wanted.append(needed)
        rest, loaded = self._read([saved["rest"], wanted])  # all arrays in one pass over the files
        pieces = {number: decoded for (number, *_), decoded in zip(ranges, loaded, strict=True)}
        numbers = itertools.count()
        for group in self._groups:
            group["params"] = [next(numbers) for _ in group["params"]]
            del group["param_names"]  # they are the model's names; the optimizer keeps its own
        if isinstance(optimizer, ZeroOptimizer):

            def find(number: int, first: int, last: int) -> dict[str, Any]:
                return _join(pieces[number], first, last, piece_shape(params[number], last - first))

            optimizer.load_state_pieces(self._groups, find)
        else:
            state: dict[Any, Any] = {
                number: _join(pieces[number], first, last, params[number].shape) for number, first, last in ranges
            }
            optimizer.load_state_dict({"state": {**state, **rest}, "param_groups": self._groups})
        optimizer._stepped = bool(saved["stepped"])


def _join(pieces: Sequence[Sequence[Any]], first: int, last: int, shape: Sequence[int]) -> dict[str, Any]:
    """The state of elements first to last of a parameter.

    pieces: those that overlap with this range; shape: of the elementwise states in the result

    A state counts as elementwise only if it is elementwise in every piece: in a piece of one element, any state of
    shape (1,) looks elementwise.
    """
    joined: dict[str, Any] = {}
    names = [set(piece[2]) for piece in pieces]
    elementwise = set.intersection(*names) if names else set()
    for start, stop, _, state in pieces:
        begin = max(first, start)
        end = min(last, stop)
        for name, value in state.items():
            if name not in elementwise or (start, stop) == (first, last):
                joined.setdefault(name, value)
                continue
            if name not in joined:
                joined[name] = wrapped_like(value, CPU.xp.empty(last - first, array_of(value).dtype))
            flat = array_of(value).reshape(-1)[begin - start : end - start]
            array_of(joined[name])[begin - first : end - first] = flat
    for name in elementwise:
        joined[name] = wrapped_like(joined[name], array_of(joined[name]).reshape(shape))
    return joined


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _describe_params(params: Iterable[Tensor], names: Mapping[int, str]) -> list[list[Any]]:
    return [[names.get(id(p)), list(p.shape)] for p in params]


def _kind(optimizer: Optimizer) -> str:
    return (optimizer._kind if isinstance(optimizer, ZeroOptimizer) else type(optimizer)).__name__


def _pieces(optimizer: Optimizer) -> Iterator[StatePiece]:
    if isinstance(optimizer, ZeroOptimizer):
        yield from optimizer.state_pieces()
        return
    state = optimizer.state
    for number, p in enumerate(_params(optimizer)):
        if p in state:
            yield number, 0, p.array.size, state[p]


def _describe(name: str | None, shape: Iterable[int]) -> str:
    return f"{name or 'no parameter of the model'} {tuple(shape)}"
