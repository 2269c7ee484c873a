"""State on GPUs: copied beside the stream that computes, in order with it, and put back where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.optim import AdamW
from tests.ddp.parallel.gpu.conftest import rig

__all__ = ["rig"]
WIDE = 160  # a weight of 200 kB is copied in the background


@pytest.mark.parametrize("background", [False, True])
def test_what_was_saved_is_what_was_there(background: bool, rig: Any, folder: Path) -> None:
    def rank(comm: Any, cupy: Any) -> list[Any]:
        ddp.manual_seed(3)
        model = nn.Linear(WIDE, WIDE, bias=False, dtype=ddp.float64).to(f"cuda:{comm.rank}")
        optimizer = AdamW(model.parameters(), lr=0.1)
        x = ddp.tensor(np.random.default_rng(0).standard_normal((3, WIDE))).to(f"cuda:{comm.rank}")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        def now() -> dict[str, Any]:
            results = {name: value.cpu().numpy() for name, value in model.state_dict().items()}
            for number, entry in optimizer.state_dict()["state"].items():
                results.update({f"{number}.{name}": value.cpu().numpy() for name, value in entry.items()})
            return results

        results = []
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, async_save=background) as ckpt:
            step()
            ckpt.save()
            step()
            step()
            results.append(now())
            assert ckpt.load()
            step()
            step()
            results.append(now())
            assert model.weight.device == ddp.device(f"cuda:{comm.rank}")
        return results

    made = rig(2, None, 0)
    for first, second in made.run(rank):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert_array_equal(second[name], value, err_msg=name)
    contexts = made.cupy.contexts
    devices = {len(contexts[thread]) for thread in contexts if thread.name == "save of a checkpoint"}
    assert devices == ({1} if background else set())
