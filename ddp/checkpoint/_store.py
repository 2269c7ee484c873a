"""Where checkpoints are kept: written by all ranks side by side, and there for all of them or for none.

A save goes through three stages, after each of which all ranks know how each of them did:

    1  rank 0 makes a folder with a temporary name; everybody says what it is going to write
    2  every rank writes its file there, to the disk
    3  rank 0 writes the manifest, to the disk, and renames the folder: from here on there is a checkpoint

Whoever is killed before the third is done leaves a folder that no one takes for a checkpoint, and that the next save
removes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from collectives.communicator import Communicator
from ddp.checkpoint import _disk, _folders, _manifest, _removing, _shards, _stages
from ddp.checkpoint._agreement import Agreement
from ddp.checkpoint._holding import Holding, look_for
from ddp.checkpoint._manifest import Manifest
from ddp.checkpoint._plan import PieceOf, Plan, plan
from ddp.checkpoint._saved import Saved
from ddp.checkpoint._searching import find_together, newest_whole
from ddp.checkpoint._shards import Array
from ddp.checkpoint._stages import Target
from ddp.checkpoint._trouble import Failed, doing
from ddp.errors import ArgumentError, CheckpointError


class Store:
    """The checkpoints in a folder, as one of the ranks that write them sees it.

    folder: made if there is none; all ranks must see the same one
    comm: a communicator; collective, as every method but `close` is. Calls are made on a duplicate of it, from any one
        thread of each rank
    keep: how many whole checkpoints are left when another has been written, at least 1; None: all

    Raises: CheckpointError on every rank if ranks see different folders, if another job uses it, or if it cannot be
    written; ArgumentError for a `keep` that is none, or an empty name.
    """

    def __init__(self, folder: str | os.PathLike[str], comm: Communicator, keep: int | None = 3) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ArgumentError(f"keep should be at least 1, or None to keep all, is {keep!r}")
        if not os.fspath(folder):
            raise ArgumentError("the folder's name is empty: '.' is this one")
        self.folder = Path(os.path.abspath(folder))
        self.keep = keep
        self._folder = str(self.folder)
        self._first = comm.rank == 0
        self._ranks = Agreement(comm)
        self._holding = Holding(self._folder)
        failed = f"{self.folder} cannot hold checkpoints"
        try:
            token = self._ranks.reach(failed, lambda: self._holding.take() if self._first else "")[0]
            self._ranks.reach(failed, lambda: look_for(self._folder, token))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another job use the folder. May be called repeatedly."""
        self._holding.close()
        self._ranks.close()

    def write(
        self,
        step: int,
        tensors: Mapping[str, Array],
        state: Any,
        own_state: Any,
        pieces: Mapping[str, PieceOf] | None = None,
        gently: bool = False,
    ) -> Path:
        """Writes a checkpoint, and returns its folder when it exists for all ranks.

        step: the same on all ranks; tensors: what this rank writes, NumPy arrays by names that no other rank uses
        state, own_state: JSON values; of the first, rank 0's is kept, of the second everybody's
        pieces: (start, stop, shape) of those of `tensors` that are one-dimensional pieces: elements start to stop, in C
            order, of a tensor of that shape, whose other pieces other ranks write under the same name
        gently: in one thread, which takes longer and leaves the cores to others

        The arrays must not be changed meanwhile. Afterwards the oldest checkpoints beyond `keep` are removed.

        Raises: CheckpointError on every rank, and then what was there before is untouched and nothing else is there;
        PeerLeft and its kin if a rank is gone.
        """
        failed = _not_saved(step)
        target: Target | None = None

        def prepare() -> tuple[Plan, Target | None]:
            nonlocal target
            mine = plan(step, tensors, state, own_state, pieces or {}, self._ranks.rank)
            if self._first:
                self._holding.take()
                if self._holding.alone():
                    with doing("reading", self._folder):
                        _removing.sweep(self._folder)
                target = _stages.choose(self._folder, step)
                _stages.begin(target)
            return mine, target

        try:
            told = self._ranks.reach(failed, prepare)
            plans, where = [each for each, _ in told], told[0][1]
            assert where is not None
            files = [_folders.shard_name(rank) for rank in range(len(plans))]
            entries = _agreed(failed, plans, files)
            rank, progress = self._ranks.rank, self._ranks.progress
            shards = self._ranks.reach(failed, lambda: _stages.write_own(where, rank, tensors, progress, gently))

            def commit() -> None:
                if self._first:
                    own = [json.loads(each.own_state) for each in plans]
                    by_name = dict(zip(files, shards, strict=True))
                    value = Manifest(step, len(files), _shards.BLOCK, by_name, entries, json.loads(plans[0].state), own)
                    _stages.commit(where, value)

            self._ranks.reach(failed, commit)
        except BaseException:
            if target is not None:
                _stages.give_up(target)
            raise
        if self._first and self.keep is not None:
            _removing.retain(self._folder, self.keep)
        return Path(where.path)

    def refuse(self, step: int, why: str) -> NoReturn:
        """What a rank calls in the place of `write` if it cannot, so that no rank saves. Raises: CheckpointError."""

        def fail() -> NoReturn:
            raise Failed(why)

        self._ranks.reach(_not_saved(step), fail)
        raise AssertionError("a rank has failed")

    def newest(self) -> Saved | None:
        """The newest checkpoint of which every byte is as it was written, None if there is none.

        Others are named in a warning of rank 0, with the reason, and passed over. Ranks share the reading.

        Raises: CheckpointError on every rank if the folder, or a file in it, cannot be read, which does not say that it
        is damaged; or if there are checkpoints and none is whole: whoever begins anew shall have said so.
        """
        failed = f"the newest checkpoint in {self.folder} cannot be found"

        def list_() -> list[str]:
            with doing("reading", self._folder):
                return _folders.newest_first(_disk.names(self._folder)) if self._first else []

        names = self._ranks.reach(failed, list_)[0]
        found, reasons = newest_whole(self._ranks, failed, [os.path.join(self._folder, name) for name in names])
        if found is None and reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole ({names[-1]}: {reasons[-1]}): to begin anew, move them away "
                "or give another folder"
            )
        return found

    def find(self, path: str | os.PathLike[str]) -> Saved:
        """The checkpoint at a path, or the newest whole one in a folder of another run's; every byte is as written.

        Raises: CheckpointError on every rank if there is none that is whole, or it cannot be read.
        """
        return find_together(self._ranks, path)


def _not_saved(step: object) -> str:
    return f"the checkpoint of step {step} was not saved, those before are as they were"


def _agreed(failed: str, plans: list[Plan], files: list[str]) -> dict[str, _manifest.Entry]:
    """The tensors that ranks are about to write. Raises: CheckpointError if they do not fit each other."""
    steps = [each.step for each in plans]
    if len(set(steps)) > 1:
        raise CheckpointError(f"{failed}: ranks are at different steps: {steps}")
    try:
        return _manifest.assemble([each.parts for each in plans], files)
    except ArgumentError as error:
        raise CheckpointError(f"{failed}: {error}") from None
