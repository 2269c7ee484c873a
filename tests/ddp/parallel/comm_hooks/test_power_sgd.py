"""PowerSGD: exact at full rank, what it leaves out comes later, and it computes what PyTorch's computes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.parallel.comm_hooks import PowerSGD
from tests.ddp.parallel.comm_hooks.driving import drive, mean, random_steps

SHAPES = {"conv": (6, 3, 2, 2), "bias": (6,), "tall": (20, 8), "wide": (8, 30), "scalar": ()}
PLAN = [["scalar", "wide"], ["tall", "bias", "conv"]]


def left_out(hooks: list[Any], name: str) -> np.ndarray:
    """What all ranks together still remember."""
    return sum(hook.state_dict()["errors"][name].numpy() for hook in hooks)


def test_the_first_steps_are_exact_and_what_is_not_worth_it_always_is() -> None:
    steps = random_steps(3, 2, SHAPES)
    became, _, calls = drive(lambda: PowerSGD(1, start_iter=2), steps, [0.5] * 3, PLAN)
    for number, (got, everyones) in enumerate(zip(became, steps, strict=True)):
        for name, exact in mean(everyones, 0.5).items():
            if number < 2 or name in ("bias", "scalar"):
                assert_allclose(got[name], exact, rtol=0, atol=1e-15)
            elif name != "conv":
                assert np.linalg.matrix_rank(got[name].reshape(len(got[name]), -1)) == 1
    assert [name for name, _ in calls] == ["all_reduce"] * (2 + 2 + 4)
    wide, tall = (8 + 1, 30), (20 + 6 + 6, 8 + 12)  # P and what is exact, Q; the conv is 6 x 12, worth it at rank 1
    assert sorted(n / 8 for _, n in calls[4:]) == sorted([*wide, *tall])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_overflowed_leaves_nothing_behind(bad: float) -> None:
    steps = random_steps(5, 2, {"w": (20, 10)})
    steps[1][0]["w"][3, 4] = bad
    became, hooks, _ = drive(lambda: PowerSGD(2, 0), steps, [0.5] * 5)
    assert not np.isfinite(became[1]["w"]).all()  # so that whoever scales the loss sees it
    for got in became[2:]:
        assert np.isfinite(got["w"]).all()
        assert np.abs(got["w"]).max() > 0.1
    after = sum(mean(everyones, 0.5)["w"] for everyones in steps[2:])
    assert_allclose(sum(got["w"] for got in became[2:]) + left_out(hooks, "w"), after, rtol=0, atol=1e-12)


def test_what_it_refuses() -> None:
    wrong: tuple[Any, ...] = (-1, "x", None, True, float("nan"))
    for name, value in itertools.product(("matrix_approximation_rank", "start_iter", "min_compression_rate"), wrong):
        with pytest.raises(ArgumentError, match=f"PowerSGD: expected .*{value!r}"):
            PowerSGD(**{name: value})
    PowerSGD(np.int64(2), np.int32(1), min_compression_rate=np.float32(1))
    with pytest.raises(StateDictError, match="queries"):
        PowerSGD().load_state_dict({"steps": 3})
    with pytest.raises(DtypeError, match="complex128"):
        drive(lambda: PowerSGD(1, 0), [[{"w": np.zeros((9, 9), complex)}]], [1.0])


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_computes_what_pytorch_computes(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is linear, so one rank of PyTorch with the mean is as many ranks of ours with its parts."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

    dist = pytest.importorskip("torch.distributed")
    theirs = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")

    def all_reduce(tensor: Any, **_: Any) -> Any:  # of one rank
        future = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    shapes = {"a": (12, 9), "b": (7,), "c": (10, 16)}
    count = 5
    alone = SimpleNamespace(size=lambda: 1)
    state = theirs.PowerSGDState(alone, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1)
    state.iter = 2
    steps = random_steps(count, ranks, shapes)
    scales = [0.5, 0.1, 2.0, 1.0, 0.3]
    draws = np.random.RandomState()
    draws.set_state(state.rng.get_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draws.randint(1_000_000_000))
        queries = {
            name: torch.randn(1, shapes[name][1], min(rank, *shapes[name]), dtype=torch.float64)[0].numpy()
            for name in ("a", "c")
        }

    expected = []
    for everyones, scale in zip(steps, scales, strict=True):
        exact = {name: torch.from_numpy(g) for name, g in mean(everyones, scale).items()}
        flat = torch.cat([g.reshape(-1) for g in exact.values()])
        bucket = SimpleNamespace(
            buffer=lambda flat=flat: flat,
            index=lambda: 0,
            is_last=lambda: True,
            gradients=lambda flat=flat: [
                part.view(shape) for part, shape in zip(flat.split([108, 7, 160]), shapes.values(), strict=True)
            ],
        )
        theirs.powerSGD_hook(state, bucket).wait()
        expected.append([g.numpy().copy() for g in bucket.gradients()])

    def ours() -> PowerSGD:
        hook = PowerSGD(rank, 0, min_compression_rate=1)
        hook.load_state_dict({"steps": 0, "queries": queries, "errors": {}})
        return hook

    became, hooks, _ = drive(ours, steps, scales)
    for got, wanted in zip(became, expected, strict=True):
        for mine, other in zip(got.values(), wanted, strict=True):
            assert_allclose(mine, other, rtol=0, atol=1e-10)
    error = state.error_dict[0].numpy()
    assert_allclose(left_out(hooks, "a").reshape(-1), error[:108], rtol=0, atol=1e-10)
    assert_allclose(left_out(hooks, "c").reshape(-1), error[115:], rtol=0, atol=1e-10)
