"""Damage to files: bit flips, truncations, garbage, and what stands in the wrong place, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence


def mutated(data: bytes, rng: random.Random, garbage: Sequence[bytes] = ()) -> bytes:
    """`data` with one to four pieces of damage; `garbage` is what is put in beside random bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _damaged(data, rng, garbage)
    return data


def _damaged(data: bytes, rng: random.Random, garbage: Sequence[bytes]) -> bytes:
    # Half of all damage is near the beginning, where headers are.
    offset = rng.randrange(min(len(data), rng.choice((24, len(data) + 1))) + 1)
    kind = rng.randrange(7)
    if kind == 0 and offset < len(data):
        return data[:offset] + bytes([data[offset] ^ 1 << rng.randrange(8)]) + data[offset + 1 :]
    if kind == 1:
        return data[:offset]
    if kind == 2 and garbage:
        return data[:offset] + rng.choice(garbage) + data[offset + rng.choice((0, 1, 8)) :]
    if kind == 3:
        return data + rng.randbytes(rng.choice((1, 100)))
    if kind == 4:
        return data[:offset] + data[offset + rng.choice((1, 4, 100)) :]
    if kind == 5:
        other = rng.randrange(len(data) + 1)
        return data[:offset] + data[other : other + rng.choice((1, 4, 100))] + data[offset:]
    noise = rng.randbytes(rng.choice((1, 4, 16)))
    return data[:offset] + noise + data[offset + len(noise) :]
