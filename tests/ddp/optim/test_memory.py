"""State follows: gradients that move into buckets and out again, parameters and state replaced from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp._layout import FlatBuckets, lay_out
from ddp.errors import StateDictError

SHAPES = [(6, 5), (7,), (), (0, 3), (40, 3), (2, 2)]
MAKE: list[Any] = [
    lambda params: ddp.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    lambda params: ddp.optim.AdamW(params, lr=0.1, amsgrad=True),
    lambda params: ddp.optim.RMSprop(params, centered=True, momentum=0.5),
]
Change = Callable[[list[Any], Any, int], None]


def parameters() -> list[Any]:
    random = np.random.default_rng(0)
    return [ddp.tensor(random.standard_normal(shape), requires_grad=True) for shape in SHAPES]


def bind(params: list[Any], plan: list[list[int]]) -> FlatBuckets:
    """Puts the gradients into buckets, as the reducer does."""
    layout = lay_out(plan, [p.shape for p in params], [p.dtype for p in params])
    buckets = FlatBuckets(layout, np.zeros)
    for p, view in zip(params, buckets.views, strict=True):
        p.leaf.grad_buffer.bind(view)
    return buckets


def train(make: Callable[..., Any], change: Change | None = None, steps: int = 6) -> tuple[list[Any], Any]:
    params = parameters()
    optimizer = make(params)
    random = np.random.default_rng(1)
    for step in range(steps):
        if change is not None:
            optimizer = change(params, optimizer, step) or optimizer
        for number, p in enumerate(params):
            g = random.standard_normal(p.shape)
            p.grad = None if (step + number) % 4 == 3 else ddp.tensor(g)
        optimizer.step()
    return params, optimizer


def into_new_plans(params: list[Any], optimizer: Any, step: int) -> None:
    plans = [[[5, 4, 3, 2, 1, 0]], [[0, 1], [2, 5], [4, 3]], [[3, 2, 1], [0, 4, 5]]]
    if step % 2 == 0:
        bind(params, plans[step // 2])


def moved_parameters(params: list[Any], optimizer: Any, step: int) -> None:
    if step == 3:
        for p in params:
            p.array = p.array.copy()


def not_contiguous(params: list[Any], optimizer: Any, step: int) -> None:
    if step == 1:
        params[4].array = np.asfortranarray(params[4].array)
        params[1].array = np.repeat(params[1].array, 2)[::2]
        bind(params, [[0, 1, 2, 3, 4, 5]])
    if step == 3:
        params[0].leaf.grad_buffer.bind(np.asfortranarray(params[0].leaf.grad_buffer.array))


def replaced_state(params: list[Any], optimizer: Any, step: int) -> None:
    if step == 2:
        for entry in optimizer.state.values():
            for name, value in entry.items():
                entry[name] = value.clone()
    if step == 4:
        for p in list(optimizer.state):
            optimizer.state[p] = dict(optimizer.state[p])


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("change", [into_new_plans, moved_parameters, not_contiguous, replaced_state])
def test_what_changes_from_outside_is_followed(make: Any, change: Change) -> None:
    expected, reference = train(make)
    actual, optimizer = train(make, change)
    # Bit for bit: no rounding depends on where something lies, or on how it is cut.
    for p, q in zip(actual, expected, strict=True):
        assert_array_equal(p.array, q.array)
        for name, value in reference.state[q].items():
            assert optimizer.state[p][name].shape == value.shape
            assert_array_equal(optimizer.state[p][name].array, value.array)


@pytest.mark.parametrize("make", MAKE)
def test_a_group_may_grow(make: Any) -> None:
    def change(params: list[Any], optimizer: Any, step: int) -> None:
        group = optimizer.param_groups[0]["params"]
        if step == 0:
            del group[1:]
            params[:] = group
        elif step == 2:
            group.append(ddp.ones(3, dtype=ddp.float64, requires_grad=True))
            params.append(group[-1])

    (first, grown), optimizer = train(make, change)
    assert first in optimizer.state
    assert grown in optimizer.state
    alone, _ = train(lambda params: make(params[:1]))
    assert_array_equal(np.isfinite(first.array), True)
    assert first.version.count == alone[0].version.count


def test_state_taken_away_begins_anew() -> None:
    p = ddp.ones(3, requires_grad=True)
    optimizer = ddp.optim.SGD([p], lr=1.0, momentum=0.5)
    p.grad = ddp.ones(3)
    optimizer.step()
    optimizer.step()
    assert p.tolist() == [-1.5] * 3
    optimizer.state.clear()
    optimizer.step()
    assert p.tolist() == [-2.5] * 3
    optimizer.state[p]["momentum_buffer"] = None
    optimizer.step()
    assert p.tolist() == [-3.5] * 3
    optimizer.state[p]["momentum_buffer"].fill_(4)
    optimizer.step()
    assert p.tolist() == [-6.5] * 3


def test_steps_are_counted_where_everybody_sees_them() -> None:
    a, b = ddp.ones(2, requires_grad=True), ddp.ones(2, requires_grad=True)
    optimizer = ddp.optim.Adam([a, b], lr=0.1, eps=0.0)
    for with_b in (True, False, True):
        a.grad = ddp.ones(2)
        b.grad = ddp.ones(2) if with_b else None
        optimizer.step()
    assert (optimizer.state[a]["step"].item(), optimizer.state[b]["step"].item()) == (3.0, 2.0)
    assert optimizer.state[a]["step"].dtype == ddp.float32
    # With constant gradients each step of Adam is lr, whatever the age: a wrong age would show.
    assert_allclose([a.array[0], b.array[0]], [0.7, 0.8], rtol=1e-6)
    optimizer.state[a]["step"].zero_()
    optimizer.state[a]["exp_avg"].zero_()
    optimizer.state[a]["exp_avg_sq"].zero_()
    optimizer.step()
    assert_allclose([a.array[0], b.array[0]], [0.6, 0.7], rtol=1e-6)


def test_settings_that_bring_a_state_along() -> None:
    p = ddp.ones(2, requires_grad=True)
    optimizer = ddp.optim.SGD([p], lr=1.0)
    p.grad = ddp.ones(2)
    optimizer.step()
    assert not optimizer.state
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    optimizer.step()
    assert p.tolist() == [-2.5, -2.5]
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    assert p.tolist() == [-3.5, -3.5]
    assert optimizer.state[p]["momentum_buffer"].tolist() == [1.5, 1.5]


def test_a_gap_between_gradients_is_nobodys() -> None:
    a, b = ddp.ones(3, requires_grad=True), ddp.ones(3, requires_grad=True)
    buckets = bind([a, b], [[0, 1]])
    a.grad, b.grad = ddp.ones(3), ddp.ones(3)
    buckets.buffers[0][3:16] = np.nan
    ddp.optim.SGD([a, b], lr=1.0, momentum=0.9).step()
    assert a.tolist() == b.tolist() == [0.0] * 3


def test_gradients_of_other_parameters_at_every_step() -> None:
    params = [ddp.ones(2, requires_grad=True) for _ in range(6)]
    optimizer = ddp.optim.SGD(params, lr=0.5)
    for pattern in range(64):
        for bit, p in enumerate(params):
            p.grad = ddp.ones(2) if pattern >> bit & 1 else None
        optimizer.step()
    assert [p.tolist() for p in params] == [[-15.0, -15.0]] * 6


def test_state_that_is_given_is_updated_in_place() -> None:
    """Processes that train together share it."""
    p = ddp.ones(2, requires_grad=True)
    given = ddp.full((2,), 4.0)
    optimizer = ddp.optim.SGD([p], lr=1.0, momentum=0.5)
    optimizer.state[p]["momentum_buffer"] = given
    p.grad = ddp.ones(2)
    optimizer.step()
    assert given.tolist() == [3.0, 3.0]


def test_state_of_the_wrong_shape() -> None:
    p = ddp.ones(2, requires_grad=True)
    optimizer = ddp.optim.Adam([p])
    optimizer.load_state_dict(
        {
            "state": {0: {"step": 1, "exp_avg": np.zeros(3, np.float32), "exp_avg_sq": np.zeros(3, np.float32)}},
            "param_groups": [{"params": [0]}],
        }
    )
    p.grad = ddp.ones(2)
    with pytest.raises(StateDictError, match=r"'exp_avg' of shape \(3,\) for a parameter of \(2,\)"):
        optimizer.step()
