"""The optimizer of one shard: an ordinary one, over this rank's pieces of the parameters in one bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ddp._tensor.core import Tensor
from ddp.optim import Optimizer
from ddp.optim._tiled import Tiled
from ddp.optim.optimizer import Group
from ddp.parallel.zero.moving import Entry, Holding
from ddp.parallel.zero.shard import Shard


class Partial:
    """Updates a shard.

    kind: the class, settings: what it is made with; groups: those of the whole optimizer, whose settings count
    numbers: of the optimizer's parameters, by id
    """

    def __init__(
        self,
        shard: Shard,
        kind: type[Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Group],
        numbers: Mapping[int, int],
    ) -> None:
        self.shard = shard
        self._order = {gradient: numbers[id(p)] for gradient, p in shard.parameters.items()}
        leaf_of = {
            id(shard.parameters[piece.number]): leaf for piece, leaf in zip(shard.pieces, shard.leaves, strict=True)
        }
        self._optimizer: Optimizer | None = None
        self._groups: list[tuple[Group, Group]] = []  # (the optimizer's own, the one whose settings it takes)
        own = []
        for group in groups:
            leaves: list[Tensor] = [leaf_of[id(p)] for p in group["params"] if id(p) in leaf_of]
            if leaves:
                own.append(({**_settings(group), "params": leaves}, group))
        if own:
            self._optimizer = kind([group for group, _ in own], **settings)
            self._groups = list(zip(self._optimizer.param_groups, [group for _, group in own], strict=True))

    def share_scratch(self, other: Partial) -> None:
        """Uses the other's scratch memory, since only one of them updates at a time."""
        if isinstance(self._optimizer, Tiled) and isinstance(other._optimizer, Tiled):
            self._optimizer._scratch = other._optimizer._scratch

    def update(self, found: Any = None) -> None:
        """One step of this rank's pieces, with the settings as they are now. found: see `Sharding.step`"""
        for own, group in self._groups:
            own.update(_settings(group))
        optimizer: Any = self._optimizer
        if optimizer is None:
            return
        if found is None:
            optimizer.step()
            return
        optimizer.found_inf = found  # GradScaler sees to it that the class is one that looks at it
        try:
            optimizer.step()
        finally:
            optimizer.found_inf = None

    def holding(self) -> Holding:
        """The state of the pieces."""
        state: Mapping[Any, Entry] = {} if self._optimizer is None else self._optimizer.state
        return Holding(shard=self.shard, order=self._order, entries=[state.get(leaf, {}) for leaf in self.shard.leaves])

    def put(self, entries: Sequence[Entry]) -> None:
        """Replaces the state. entries: of each piece; without a name: it has none"""
        if self._optimizer is not None:
            state: defaultdict[Any, Entry] = defaultdict(dict)
            state.update({leaf: entry for leaf, entry in zip(self.shard.leaves, entries, strict=True) if entry})
            self._optimizer.state = state


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
