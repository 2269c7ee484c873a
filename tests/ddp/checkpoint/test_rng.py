"""Random numbers go on where they were, on every rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import ddp
from ddp.checkpoint.state import derive_random, random_state, restore_random
from ddp.serialization.structure import Decoder, encode


def through_json(state: Any) -> Any:
    kept = {}

    def keep(name: str, array: Any, _: Any) -> str:
        kept[name] = np.array(array)
        return name

    return Decoder(kept.__getitem__).decode(encode(state, "random", keep))


def draw() -> list[Any]:
    return [
        ddp.rand(3).tolist(),
        ddp.randint(0, 100, (2,)).tolist(),
        np.random.standard_normal(),  # an odd number of them: the other one is remembered
        np.random.random(),
        random.gauss(0, 1),
        random.random(),
        ddp.initial_seed(),
    ]


def test_every_generator_goes_on() -> None:
    ddp.manual_seed(5)
    np.random.seed(6)
    random.seed(7)
    draw()
    state = through_json(random_state())
    expected = draw()
    ddp.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert draw() != expected
    restore_random(state)
    assert draw() == expected


def test_a_rank_that_was_not_there_gets_numbers_of_its_own() -> None:
    saved = []
    for seed in (1, 2):
        ddp.manual_seed(seed)
        ddp.rand(1)
        saved.append(through_json(random_state()))

    def derived(rank: int, step: int, states: list[Any]) -> list[Any]:
        derive_random(states, rank, step)
        return draw()

    first = derived(2, 10, saved)
    assert derived(2, 10, saved) == first
    assert derived(3, 10, saved) != first
    assert derived(2, 11, saved) != first
    assert derived(2, 10, saved[:1]) != first
