"""A training run on streams that lag as CUDA lets them gives the CPU's numbers, for every seed; and without any one of
the edges, or of what is kept alive, some seed does not: a simulation that finds no planted bug would prove nothing.

Batches come by the loader's own stream, a part of forward runs on a stream of the user's, losses are fetched and read
later, and memory that became free is written to at once. Collectives are beside it: `tests/ddp/parallel/gpu`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from tests.ddp.cuda import emulation
from tests.gpu.installing import Gpu, forget

pytestmark = [
    pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU"),
    pytest.mark.timeout(900),  # the full count takes minutes
]

WIDTH, ROWS, BATCH = 8, 24, 4
OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda p: ddp.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: ddp.optim.AdamW(p, 1e-2),
    lambda p: ddp.optim.RMSprop(p, 1e-2, momentum=0.9),
]
nn = ddp.nn


def train(seed: int, device: str) -> dict[str, Any]:
    """A few epochs of steps of kinds that the seed draws; returns parameters and losses."""
    dice = random.Random(seed)
    rng = np.random.default_rng(seed)
    data = ddp.from_numpy(rng.normal(size=(ROWS, WIDTH)))
    labels = ddp.from_numpy(rng.integers(0, 3, ROWS))
    ddp.manual_seed(seed)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=ddp.float64), nn.GELU()).to(device)
    last = nn.Sequential(nn.LayerNorm(WIDTH, dtype=ddp.float64), nn.Linear(WIDTH, 3, dtype=ddp.float64)).to(device)
    scale = nn.Parameter(ddp.full((WIDTH,), 2.0, dtype=ddp.float64, device=device))
    parameters = [scale, *first.parameters(), *last.parameters()]
    optimizer = dice.choice(OPTIMIZERS)(parameters)
    on_gpu = device != "cpu"
    loader = ddp.data.DataLoader(
        ddp.data.TensorDataset(data, labels), BATCH, pin_memory=on_gpu, pin_memory_device=device if on_gpu else ""
    )
    side = ddp.cuda.Stream() if on_gpu else None
    logs = []
    for x, target in loader:
        between(device)
        hidden = first(x)
        if dice.random() < 0.5:
            hidden = scaled(hidden, scale, side) + hidden
        loss = nn.functional.cross_entropy(last(hidden), target)
        del hidden, x, target
        loss.backward()
        between(device)
        if dice.random() < 0.5:
            nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(ddp.cuda.fetch(loss.detach()))
        del loss
        between(device)
    found = {f"loss {i}": np.asarray(log.value()) for i, log in enumerate(logs)}
    return found | {f"parameter {i}": p.detach().cpu().numpy() for i, p in enumerate(parameters)}


def scaled(x: Any, scale: Any, side: Any) -> Any:
    """scale x², on another stream, from memory that nobody here keeps."""
    if side is None:
        return x * x * scale
    square = x * x
    here = ddp.cuda.current_stream()
    side.wait_stream(here)
    with ddp.cuda.stream(side):
        square.detach().record_stream(side)
        result = square * scale
    del square
    between("cuda")
    here.wait_stream(side)
    result.detach().record_stream(here)
    return result


def between(device: str) -> None:
    """What a program does besides: takes memory that became free, and writes to it."""
    for shape in ((), (BATCH,), (BATCH, WIDTH), (BATCH, 3), (WIDTH, WIDTH)):
        ddp.empty(shape, dtype=ddp.float64, device=device).fill_(1e6)


def simulate(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Gpu(patch, seed, devices=1)
        try:
            got = train(seed, "cuda")
        finally:
            forget()
    expected = train(seed, "cpu")
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=f"{name}, seed {seed}")


def test_every_order_that_cuda_allows_gives_the_numbers_of_the_cpu(count: Callable[[int, int], int]) -> None:
    for seed in range(count(3, 1000)):
        simulate(seed)


# And the other way round ----------------------------------------------------------------------------------------------
