"""What one rank wishes all know after the same backward, and no call is made for it."""

from __future__ import annotations

from typing import Any

import collectives
import ddp
from ddp import nn
from ddp.parallel.wishes import KINDS, SAVE, SAVED, STOP, Wishes


def test_heard_until_forgotten() -> None:
    wishes = Wishes()
    wishes.hear([0, 1, 2])
    wishes.hear([1, 0, 1])
    assert wishes.heard == [1, 1, 2]
    wishes.forget()
    assert wishes.heard == [0] * KINDS


def test_all_ranks_hear_them_after_the_same_backward() -> None:
    def run(comm: collectives.Communicator) -> list[Any]:
        model = ddp.DataParallel(nn.Linear(2, 1), comm)
        wishes, found = model._reducer.wishes, []
        for step in range(4):
            if step == 1 and comm.rank == 2:
                wishes.mine[STOP] = True
            if step == 2:
                wishes.mine[SAVED] = True
                wishes.mine[SAVE] = comm.rank == 0
            loss = model(ddp.ones(1, 2)).sum()
            if step == 1:
                with model.no_sync():  # what is not reduced tells nobody
                    loss.backward()
            else:
                loss.backward()
            found.append(list(wishes.heard))
            wishes.forget()
        return found

    nothing = [0] * KINDS
    found = collectives.run_threads(run, size=3)
    assert found == [[nothing, nothing, [1, 1, 3], [1, 1, 3]]] * 3


def test_they_come_with_the_control_message_alone() -> None:
    def run(comm: collectives.Communicator) -> list[int]:
        model = ddp.DataParallel(
            nn.Linear(2, 1), comm, plan={"buckets": [["weight", "bias"]], "nbytes": [12], "from": ""}
        )
        counts = []
        for wish in (False, False, True):
            model._reducer.wishes.mine[STOP] = wish
            before = model.comm.queue.started
            model(ddp.ones(1, 2)).sum().backward()
            counts.append(model.comm.queue.started - before)
        return counts

    for counts in collectives.run_threads(run, size=2):
        assert len(set(counts)) == 1


def test_several_models_share_one() -> None:
    def run(comm: collectives.Communicator) -> list[int]:
        first, second = (ddp.DataParallel(nn.Linear(2, 1), comm) for _ in range(2))
        first._reducer.wishes = second._reducer.wishes = wishes = Wishes()
        first(ddp.ones(1, 2)).sum().backward()
        if comm.rank == 0:
            wishes.mine[STOP] = True  # between the two
        second(ddp.ones(1, 2)).sum().backward()
        return wishes.heard

    assert collectives.run_threads(run, size=2) == [[1, 0, 0]] * 2


def test_a_rank_without_data_wishes_too() -> None:
    def run(comm: collectives.Communicator) -> int:
        model = ddp.DataParallel(nn.Linear(2, 1), comm)
        with model.join():
            if comm.rank == 1:
                model._reducer.wishes.mine[STOP] = True
            for _ in range(2 - comm.rank):
                model(ddp.ones(1, 2)).sum().backward()
                model._reducer.wishes.forget()
            if comm.rank == 0:
                model(ddp.ones(1, 2)).sum().backward()
        return model._reducer.wishes.heard[STOP]

    assert collectives.run_threads(run, size=2) == [1, 1]
