"""The control message; requests in it are known to all ranks after the same backward, without a call of their own."""

from __future__ import annotations

from typing import Any

import collectives
import ddp
from ddp import nn
from ddp.parallel.control import REQUEST_KINDS, SAVE, SAVED, STOP
from tests.ddp.parallel.ranks import on_ranks


def test_all_ranks_receive_requests_after_the_same_backward() -> None:
    def run(comm: collectives.Communicator) -> list[Any]:
        model = ddp.DataParallel(nn.Linear(2, 1), comm)
        requests = model.reducer.requests
        by_rank = []
        for step in range(4):
            if step == 1 and comm.rank == 2:
                requests.requested[STOP] = True
            if step == 2:
                requests.requested[SAVED] = True
                requests.requested[SAVE] = comm.rank == 0
            loss = model(ddp.ones(1, 2)).sum()
            if step == 1:
                with model.no_sync():  # what is not reduced tells nobody
                    loss.backward()
            else:
                loss.backward()
            by_rank.append(list(requests.received))
            requests.received = [0] * REQUEST_KINDS
        return by_rank

    nothing = [0] * REQUEST_KINDS
    by_rank = on_ranks(run, 3)
    received = [1, 1, 3, 0, 0]
    assert by_rank == [[nothing, nothing, received, received]] * 3


def test_a_rank_without_data_makes_requests_too() -> None:
    def run(comm: collectives.Communicator) -> int:
        model = ddp.DataParallel(nn.Linear(2, 1), comm)
        with model.join():
            if comm.rank == 1:
                model.reducer.requests.requested[STOP] = True
            for _ in range(2 - comm.rank):
                model(ddp.ones(1, 2)).sum().backward()
                model.reducer.requests.received = [0] * REQUEST_KINDS
            if comm.rank == 0:
                model(ddp.ones(1, 2)).sum().backward()
        return model.reducer.requests.received[STOP]

    assert on_ranks(run) == [1, 1]
