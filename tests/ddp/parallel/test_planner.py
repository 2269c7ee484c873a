"""When the plan of buckets changes, and to what: literal tables with a fake communicator, then plans of real models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ParallelError
from ddp.optim import SGD, AdamW
from ddp.parallel import ZeroOptimizer
from ddp.parallel import planner as planner_module
from ddp.parallel.bucket_plan import Link, Plan
from ddp.parallel.planner import WARM, Planner, arrival_order, measure_link
from tests.ddp.parallel.ranks import on_each_of, on_ranks

NAN = float("nan")


@pytest.mark.parametrize(
    ("ready", "order"),
    [
        ([], []),
        ([1.0], [0]),
        ([3.0, NAN, 1.0], [2, 1, 0]),
        ([1.0, 2.0, 3.0], [0, 1, 2]),
        # At once: as backward makes them, the last first.
        ([1.0, 1.0, 1.0], [2, 1, 0]),
        ([NAN, NAN, NAN], [2, 1, 0]),
        # What never came stays behind its neighbour of the model.
        ([NAN, 5.0, NAN, 1.0], [3, 2, 1, 0]),
        ([2.0, NAN, 5.0, NAN], [3, 0, 2, 1]),
    ],
)
def test_arrival_order(ready: list[float], order: list[int]) -> None:
    assert arrival_order(np.array(ready)) == order


class Fake:
    """Rank 0 of several; the others say `others` in every all_reduce."""

    def __init__(self, size: int = 2, others: Sequence[float] = ()) -> None:
        self.size = size
        self.rank = 0
        self.others = others
        self.calls: list[str] = []

    def all_reduce(self, x: Any, op: Any) -> Any:
        self.calls.append(f"all_reduce {op.value}")
        return np.maximum(x, self.others) if len(self.others) else x.copy()


def planner(comm: Any, trained: Sequence[bool] = (True,) * 4, dtypes: Sequence[Any] = (), **options: Any) -> Planner:
    """Of parameters a, b, ... of 4 bytes each, two in a bucket."""
    count = len(trained)
    return Planner(
        comm, "abcdefgh"[:count], [4] * count, dtypes or [0] * count, trained, **{"cap": 8, "first": 8, **options}
    )


def letters(plan: Plan | None) -> str | None:
    return None if plan is None else " ".join("".join(bucket) for bucket in plan.buckets)


def timed(*ready: float, backward: float = 5.0) -> Any:
    """What an ArrivalTimer has measured."""
    return SimpleNamespace(seconds=lambda: (np.array(ready), backward))


ALL = [True] * 4
READY = timed(3.0, 1.0, 4.0, 2.0)
LATER = timed(2.0, 4.0, 1.0, 3.0, backward=60.0)


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({}, "dc ba", "bd ac"),
        ({"first": 4}, "d cb a", "b da c"),
        ({"cap": 100, "first": 100}, "dcba", "bdac"),
        ({"cap": 1, "first": 1}, "d c b a", "b d a c"),
        # Gradients of two dtypes are never in one bucket. Buckets are in the order of their last gradients.
        ({"dtypes": "xxyy"}, "dc ba", "ba dc"),
        ({"dtypes": "xyxy"}, "db ca", "bd ac"),
    ],
)
def test_the_first_backwards_show_the_order_and_by_a_cap_it_stays(
    options: dict[str, Any], first: str, second: str
) -> None:
    comm = Fake()
    tested = planner(comm, **options)
    assert letters(tested.plan) == first
    assert tested.plan.origin == "in reversed model order"
    for _ in range(WARM - 1):
        assert tested.after_backward(READY, ALL) is None
    assert letters(tested.after_backward(READY, ALL)) == second
    assert tested.plan.origin == "in the order in which gradients came"
    for _ in range(20):
        assert tested.after_backward(LATER, ALL) is None
    assert comm.calls == ["all_reduce max"]


def test_the_order_is_that_of_the_latest_rank() -> None:
    # This rank has a at 3, c at 4; the others had a at 8, b at 9, and d at 3.5.
    tested = planner(Fake(others=[8.0, 9.0, 1.0, 3.5, 0.0]), cap=4, first=4)
    for _ in range(WARM):
        plan = tested.after_backward(timed(3.0, NAN, 4.0, NAN), ALL)
    assert letters(plan) == "d c a b"


def used(*without: int) -> list[bool]:
    return [index not in without for index in range(4)]


def test_a_parameter_that_was_frozen_gets_a_place_where_some_rank_uses_it() -> None:
    tested = planner(Fake(), [False, True, True, True], cap=4, first=4)
    assert letters(tested.plan) == "d c b"
    plans = [
        tested.after_backward(timed(1.0, 2.0, 3.0, 4.0), used(*([0] if step < 5 else []))) for step in range(1, 20)
    ]
    assert {step: letters(plan) for step, plan in enumerate(plans, 1) if plan} == {3: "b c d", 5: "b c d a"}


def test_an_automatic_cap_is_chosen_once_from_the_times_of_a_warm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(comm: Any, most: int, xp: Any) -> Link:
        measured.append(most)
        return Link(alpha=1.0, beta=1e-6)

    monkeypatch.setattr(planner_module, "measure_link", measure)
    tested = Planner(Fake(), "abcd", [1 << 20] * 4, "xxxx", ALL, cap=None, first=1 << 20)
    assert letters(tested.plan) == "d cba"
    for _ in range(WARM - 1):
        assert tested.after_backward(READY, ALL) is None
    plan = tested.after_backward(READY, ALL)
    assert plan is not None
    assert plan.origin == "chosen from measured times"
    assert [tested.after_backward(LATER, ALL) for _ in range(9)] == [None] * 9
    assert measured == [4 << 20]


GIVEN = Plan(buckets=(("c", "a"), ("d", "b")), nbytes=(8, 8), origin="by hand")


def test_a_given_plan_stays_whatever_comes_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(planner_module, "measure_link")
    comm = Fake()
    tested = planner(comm, pinned=GIVEN, cap=None)
    assert letters(tested.plan) == "ca db"
    assert tested.plan.origin == "by hand"
    for _ in range(15):
        assert tested.after_backward(READY, used(1)) is None
    assert comm.calls == []
    # What is frozen at first has its place when it is used; what the plan does not know comes at its end.
    tested = planner(comm, [False, True, True, True, True], pinned=GIVEN, cap=None)
    assert letters(tested.plan) == "c db e"
    assert letters(tested.after_backward(timed(*[NAN] * 5), [True] * 5)) == "c db e a"


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([["a", "x"], ["b"]], "no parameter is named x"),
        ([["a", "b"], ["c", "a"]], "a is in it twice"),
        ([["a", "b"]], "a shares a bucket with a parameter of another dtype"),
    ],
)
def test_a_given_plan_that_does_not_fit_is_refused(buckets: list[list[str]], message: str) -> None:
    given = Plan(buckets=tuple(map(tuple, buckets)), nbytes=(0,) * len(buckets), origin="by hand")
    with pytest.raises(ParallelError, match=f"does not fit this model: {message}"):
        planner(Fake(), dtypes="xyzz", pinned=given)


def test_a_plan_of_something_else_changes_nothing() -> None:
    mine = planner(Fake())
    before = mine.state()
    with pytest.raises(ParallelError, match="no parameter is named z"):
        mine.restore({**before, "plan": {"buckets": [["z"]], "nbytes": [4], "from": ""}})
    assert (mine.state(), mine.assigned) == (before, [True] * 4)


def make(comm: collectives.Communicator, sharded: bool) -> tuple[Any, Any]:
    ddp.manual_seed(4)
    net = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5)))
    model = ddp.DataParallel(net, comm, first_bucket_mb=1e-4, bucket_cap_mb=5e-4)
    return model, ZeroOptimizer(model, AdamW) if sharded else SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    rng = np.random.default_rng([seed, model.comm.rank])
    model(ddp.tensor(rng.standard_normal((3, 9)), dtype=ddp.float32)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_live_model_takes_it_over_and_sums_to_the_same_bits(sharded: bool) -> None:
    """On three ranks the order in which a bucket's parts are added up depends on the plan."""

    def run(comm: collectives.Communicator) -> bool:
        model, optimizer = make(comm, sharded)
        for seed in range(2):
            step(model, optimizer, seed)
        other, second = make(comm, sharded)
        other.load_state_dict(model.state_dict())
        other.load_plan_state(json.loads(json.dumps(model.plan_state())))
        second.load_state_dict(optimizer.state_dict())
        assert other.plan.buckets == model.plan.buckets
        for seed in range(2, 5):
            step(model, optimizer, seed)
            step(other, second, seed)
        theirs = other.state_dict()
        return all(t.numpy().tobytes() == theirs[name].numpy().tobytes() for name, t in model.state_dict().items())

    assert all(on_ranks(run, 3))


@on_each_of(2)
def test_what_is_no_plan_is_told(comm: Communicator) -> None:
    model, _ = make(comm, False)
    before = model.plan_state()
    other = {"buckets": [["0.weight"]], "nbytes": [324], "from": "by hand"}
    for wrong in ({}, {"plan": 3}, {"plan": other}, *({"plan": other, "backwards": count} for count in ("x", np.inf))):
        with pytest.raises(ParallelError, match="plan"):
            model.load_plan_state(wrong)
        assert model.plan_state() == before


def test_a_link_is_as_slow_as_the_slowest_rank_and_the_same_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = planner_module._seconds

    def seconds(comm: Any, array: Any) -> float:
        real(comm, array)
        return (0.002 if array.nbytes == 1 << 12 else 0.003) * (5 if comm.rank else 1)

    monkeypatch.setattr(planner_module, "_seconds", seconds)
    links = on_ranks(lambda comm: measure_link(comm, 1 << 22), 2)
    assert links[0] == links[1]
    assert links[0].alpha + links[0].beta * (1 << 21) == pytest.approx(0.015)
    monkeypatch.setattr(planner_module, "_seconds", lambda comm, array: 0.004 if array.nbytes == 1 << 12 else 0.003)
    assert on_ranks(lambda comm: measure_link(comm, 1 << 22), 2)[0].beta > 0
