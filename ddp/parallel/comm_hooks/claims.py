"""Ranks have to bring the same communication hook to a model, and one whose memory is not another model's.

Either would be found late or never: hooks with other settings make other calls in the middle of a backward, and what a
hook left out of one model's gradients would be added to another's, where names and shapes are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from collectives import Communicator
from ddp.errors import ArgumentError, ParallelError
from ddp.parallel.comm_hooks.grad_bucket import Hook
from ddp.parallel.naming import naming

#: Who uses each hook that has a state, by the hook's id, which is nobody else's while a user lives, and holds the hook.
_users: WeakValueDictionary[int, Any] = WeakValueDictionary()
_lock = threading.Lock()  # never held during a collective: simulated ranks share it


class Brought(NamedTuple):
    """What a rank brings, as it tells the others.

    settings: in words, by name; free: nobody else on this rank uses the hook
    """

    name: str
    phases: int
    settings: Mapping[str, str]
    free: bool


def agree(comm: Communicator, user: Any, hook: Hook, name: str, phases: int) -> None:
    """Makes the hook `user`'s own, if it has a state, until `give_up`. Collective.

    Raises: ParallelError on every rank if ranks bring different hooks, or one of them is in use.
    """
    settings = getattr(hook, "same_on_all_ranks", {})
    if not isinstance(settings, Mapping):
        raise ArgumentError(f"a hook's same_on_all_ranks should be a dict of settings, is {settings!r:.60}")
    words = {str(key): repr(value) for key, value in settings.items()}
    try:
        with naming("DataParallel, comparing the ranks' communication hooks"):
            everyones = comm.all_gather_object(tuple(Brought(name, phases, words, _claim(user, hook))))
        _check([Brought(*each) for each in everyones])
    except BaseException:
        give_up(user, hook)
        raise


def give_up(user: Any, hook: Hook) -> None:
    """The hook, if it is `user`'s, may be another's."""
    with _lock:
        if _users.get(id(hook)) is user:
            del _users[id(hook)]


def _claim(user: Any, hook: Hook) -> bool:
    if not hasattr(hook, "state_dict"):
        return True
    with _lock:
        return _users.setdefault(id(hook), user) is user


def _check(everyones: Sequence[Brought]) -> None:
    first = everyones[0]
    if any((each.name, each.phases) != (first.name, first.phases) for each in everyones):
        listed = [
            f"rank {rank} gives {each.name} with {each.phases} phase{'' if each.phases == 1 else 's'}"
            for rank, each in enumerate(everyones)
        ]
        raise ParallelError(f"all ranks should give the same comm_hook: {', '.join(listed)}")
    for rank, each in enumerate(everyones):
        for name in sorted({*first.settings, *each.settings}):
            zeros, theirs = first.settings.get(name, "missing"), each.settings.get(name, "missing")
            if zeros != theirs:
                raise ParallelError(
                    f"comm_hook {first.name}: {name} is {zeros:.60} on rank 0, but {theirs:.60} on rank {rank}: all "
                    "ranks have to give the same"
                )
    used = [str(rank) for rank, each in enumerate(everyones) if not each.free]
    if used:
        raise ParallelError(
            f"comm_hook {first.name} serves another model already, on rank {', '.join(used)}, and remembers that one's "
            "gradients: each model needs a hook object of its own, or close() of the other one comes first"
        )
