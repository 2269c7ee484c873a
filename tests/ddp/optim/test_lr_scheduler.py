"""Sixty steps of every schedule beside PyTorch's: rates, momenta, and what goes on from a state dict."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.optim import lr_scheduler

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

# PyTorch itself makes such a call where a chain is part of a sequence.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

STEPS = 60
Make = Callable[[Any, Any], Any]  # (the module of schedules, the optimizer)


class Halving:
    """A function with a memory."""

    def __init__(self) -> None:
        self.every = 7

    def __call__(self, epoch: int) -> float:
        return 0.5 ** (epoch // self.every)


CASES: dict[str, Make] = {
    "lambda": lambda s, o: s.LambdaLR(o, lambda epoch: 0.95**epoch),
    "lambdas": lambda s, o: s.LambdaLR(o, [lambda epoch: 1 / (epoch + 1), Halving()]),
    "multiplicative": lambda s, o: s.MultiplicativeLR(o, lambda epoch: 0.9 if epoch % 3 else 1.1),
    "step": lambda s, o: s.StepLR(o, 7, gamma=0.3),
    "multistep": lambda s, o: s.MultiStepLR(o, [5, 20, 20, 41], gamma=0.5),
    "constant": lambda s, o: s.ConstantLR(o, factor=0.25, total_iters=9),
    "linear": lambda s, o: s.LinearLR(o, start_factor=0.1, end_factor=0.8, total_iters=11),
    "exponential": lambda s, o: s.ExponentialLR(o, 0.93),
    "polynomial": lambda s, o: s.PolynomialLR(o, total_iters=30, power=2.0),
    "cosine": lambda s, o: s.CosineAnnealingLR(o, 13, eta_min=0.001),
    "restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 10, eta_min=0.01),
    "restarts-longer": lambda s, o: s.CosineAnnealingWarmRestarts(o, 4, T_mult=2),
    "onecycle": lambda s, o: s.OneCycleLR(o, max_lr=[0.5, 1.0], total_steps=STEPS),
    "onecycle-three": lambda s, o: s.OneCycleLR(
        o, 0.7, epochs=6, steps_per_epoch=12, three_phase=True, anneal_strategy="linear", pct_start=0.25, div_factor=5.0
    ),
    "cyclic": lambda s, o: s.CyclicLR(o, [0.01, 0.02], 0.3, step_size_up=5, step_size_down=9),
    "cyclic-2": lambda s, o: s.CyclicLR(o, 0.01, 0.3, step_size_up=6, mode="triangular2"),
    "cyclic-exp": lambda s, o: s.CyclicLR(o, 0.01, 0.3, 6, mode="exp_range", gamma=0.98, base_momentum=0.7),
    "cyclic-own": lambda s, o: s.CyclicLR(o, 0.01, 0.3, 6, scale_fn=Halving(), scale_mode="iterations"),
    "sequential": lambda s, o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, total_iters=5), s.CosineAnnealingLR(o, 20), s.ExponentialLR(o, 0.9)], [5, 30]
    ),
    "sequential-restarts": lambda s, o: s.SequentialLR(
        o, [s.ConstantLR(o, 0.5, 100), s.CosineAnnealingWarmRestarts(o, 6, 2), s.StepLR(o, 3)], [8, 31]
    ),
    "sequential-momenta": lambda s, o: s.SequentialLR(
        o, [s.CyclicLR(o, 0.01, 0.3, 4), s.OneCycleLR(o, 0.5, STEPS, base_momentum=0.1, max_momentum=0.6)], [9]
    ),
    "chained": lambda s, o: s.ChainedScheduler(
        [s.ConstantLR(o, 0.1, 4), s.ExponentialLR(o, 0.9), s.MultiStepLR(o, [10, 30], 0.5)]
    ),
    "nested": lambda s, o: s.SequentialLR(
        o, [s.ChainedScheduler([s.LinearLR(o, 0.2), s.ExponentialLR(o, 0.97)]), s.ConstantLR(o, 0.5, 10)], [20]
    ),
}


def optimizers() -> tuple[Any, Any]:
    """One here and one there, of two groups."""
    made = []
    for module, tensor in ((ddp, ddp.ones), (torch, torch.ones)):
        groups = [{"params": [tensor(1, requires_grad=True)]}, {"params": [tensor(1, requires_grad=True)], "lr": 0.3}]
        made.append(module.optim.SGD(groups, lr=0.1, momentum=0.5))
    return made[0], made[1]


def sequence(optimizer: Any, scheduler: Any, steps: int) -> list[list[float]]:
    """Rates and momenta of both groups after each step."""
    results = []
    for _ in range(steps):
        optimizer.step()
        results.append([group[name] for group in optimizer.param_groups for name in ("lr", "momentum")])
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        scheduler.step()
    return results


def assert_same(actual: list[list[float]], expected: list[list[float]]) -> None:
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_rates_and_what_goes_on_from_a_state_dict(make: Make) -> None:
    mine, theirs = optimizers()
    ours, oracle = make(lr_scheduler, mine), make(torch.optim.lr_scheduler, theirs)
    result = sequence(mine, ours, 23)
    resumed = [resume(order, make, mine.state_dict(), ours.state_dict()) for order in ORDERS]
    assert json.loads(json.dumps(state := ours.state_dict())).keys() == {str(key) for key in state}
    result += sequence(mine, ours, STEPS - 23)
    assert_same(result, sequence(theirs, oracle, STEPS))
    for optimizer, scheduler in resumed:
        assert sequence(optimizer, scheduler, STEPS - 23) == result[23:]


# m: the schedule is made; o, s: the state of the optimizer, and of the schedule, is loaded
ORDERS = ["mos", "mso", "oms", "omso", "moms"]


def resume(order: str, make: Make, optimizer_state: Any, scheduler_state: Any) -> tuple[Any, Any]:
    optimizer, _ = optimizers()
    scheduler: Any = None
    for call in order:
        if call == "m":
            scheduler = make(lr_scheduler, optimizer)
        elif call == "o":
            optimizer.load_state_dict(optimizer_state)
        else:
            scheduler.load_state_dict(scheduler_state)
    return optimizer, scheduler


def test_loaded_rates_count_until_the_next_step() -> None:
    optimizer, _ = optimizers()
    optimizer.param_groups[0]["lr"] = rate = ddp.tensor(0.5)
    other, _ = optimizers()
    other.param_groups[0]["lr"] = ddp.tensor(0.25)
    optimizer.load_state_dict(other.state_dict())
    rate = optimizer.param_groups[0]["lr"]
    scheduler = lr_scheduler.ConstantLR(optimizer, 0.5)
    state = scheduler.state_dict()
    assert rate.item() == 0.125
    scheduler.load_state_dict(state)
    assert (optimizer.param_groups[0]["lr"] is rate, rate.item()) == (True, 0.25)
    optimizer.step()
    rate.fill_(0.75)
    scheduler.load_state_dict(state)
    assert rate.item() == 0.75


@pytest.mark.parametrize(
    "make",
    [
        lambda s, o: s.ChainedScheduler([s.ChainedScheduler([s.ConstantLR(o)]), s.ConstantLR(o)]),
        lambda s, o: s.ChainedScheduler([s.ConstantLR(o)]),
    ],
    ids=["inner", "outer"],
)
def test_a_state_of_another_number_of_schedules_changes_nothing(make: Make) -> None:
    optimizer, _ = optimizers()
    nested = lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)])
    other = lr_scheduler.ChainedScheduler([nested, lr_scheduler.ConstantLR(optimizer)])
    scheduler = make(lr_scheduler, optimizer)
    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(StateDictError, match="the state of each function and schedule"):
        scheduler.load_state_dict(other.state_dict())
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("sequential", "chained", "nested"))])
def test_last_epoch_goes_on(name: str) -> None:
    results = []
    for optimizer, module in zip(optimizers(), (lr_scheduler, torch.optim.lr_scheduler), strict=True):
        sequence(optimizer, CASES[name](module, optimizer), 12)

        class Spy:
            """Hands on to the module, with last_epoch."""

            def __getattr__(self, name: str, module: Any = module) -> Any:
                return lambda *args, **kwargs: getattr(module, name)(*args, last_epoch=11, **kwargs)

        results.append(sequence(optimizer, CASES[name](Spy(), optimizer), 20))
    assert_same(*results)


def test_momenta_of_a_cycle_that_goes_on() -> None:
    results = []
    for optimizer, module in zip(optimizers(), (lr_scheduler, torch.optim.lr_scheduler), strict=True):
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.1
        scheduler = module.CyclicLR(optimizer, 0.01, 0.3, 5, base_momentum=[0.1, 0.2], last_epoch=11)
        assert (scheduler.base_momentums, scheduler.max_momentums) == ([0.1, 0.2], [0.9, 0.9])
        results.append(sequence(optimizer, scheduler, 20))
    assert_same(*results)


def test_only_our_functions_are_saved_by_their_state() -> None:
    class Own(lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            return self.base_lrs

    optimizer, _ = optimizers()
    ours, other = Own(optimizer), Own(optimizer)
    net = ddp.nn.Linear(1, 1)
    ours.model = net
    ours.kind = ddp.nn.Linear
    ours.functions = [abs]
    held = other.model = ddp.nn.Linear(1, 1)
    weight = held.weight
    other.load_state_dict(ours.state_dict())
    assert (other.model, other.kind, other.functions) == (net, ddp.nn.Linear, [abs])
    assert held.weight is weight

    cyclic = [lr_scheduler.CyclicLR(optimizer, 0.01, 0.3, scale_fn=function) for function in (Halving(), None)]
    cyclic[1].load_state_dict(cyclic[0].state_dict())
    assert cyclic[1].scale_fn(1) == 1.0


def test_none_is_no_epoch_to_go_to() -> None:
    optimizer, _ = optimizers()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step(None)
    assert scheduler.last_epoch == 1


def test_restarts_take_fractions() -> None:
    mine, theirs = optimizers()
    ours = lr_scheduler.CosineAnnealingWarmRestarts(mine, 3, T_mult=2)
    oracle = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(theirs, 3, T_mult=2)
    for i in range(100):
        ours.step(i / 4)
        oracle.step(i / 4)
        assert ours.get_last_lr() == pytest.approx(oracle.get_last_lr(), rel=1e-12)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("options", [{}, {"patience": 2, "cooldown": 3, "min_lr": [0.01, 0.02]}, {"patience": 0}])
def test_plateau(mode: str, threshold_mode: str, options: Any) -> None:
    mine, theirs = optimizers()
    settings = {"mode": mode, "factor": 0.5, "threshold": 0.05, "threshold_mode": threshold_mode, **options}
    ours = lr_scheduler.ReduceLROnPlateau(mine, **settings)
    oracle = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, **settings)
    for step in range(STEPS):
        metric = math.sin(step / 4) + 1.5 / (step + 1)
        ours.step(ddp.tensor(metric, dtype=ddp.float64) if step % 2 else metric)
        oracle.step(metric)
        assert ours.get_last_lr() == pytest.approx(oracle.get_last_lr(), rel=1e-12)
        assert (ours.num_bad_epochs, ours.in_cooldown) == (oracle.num_bad_epochs, oracle.in_cooldown)
        if step == 30:
            state = ours.state_dict()
            ours = lr_scheduler.ReduceLROnPlateau(mine)
            ours.load_state_dict(state)


def test_lowest_rates_may_be_changed() -> None:
    for optimizer, module in zip(optimizers(), (lr_scheduler, torch.optim.lr_scheduler), strict=True):
        scheduler = module.ReduceLROnPlateau(optimizer, patience=0)
        scheduler.min_lrs = [0.05, 0.2]
        for _ in range(3):
            scheduler.step(1.0)
        assert (scheduler.min_lrs, scheduler.get_last_lr()) == ([0.05, 0.2], [0.05, 0.2])


@pytest.mark.parametrize("name", lr_scheduler.__all__)
def test_arguments_are_pytorchs(name: str) -> None:
    ours = inspect.signature(getattr(lr_scheduler, name)).parameters
    theirs = inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_a_rate_that_is_a_tensor_stays_it() -> None:
    lr = ddp.tensor(0.5, dtype=ddp.float64)
    optimizer = ddp.optim.SGD([ddp.ones(1, requires_grad=True)], lr=lr)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert scheduler.get_last_lr() == [0.25]


def test_betas_cycle_too() -> None:
    optimizer = ddp.optim.AdamW([ddp.ones(1, requires_grad=True)])
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    optimizer.step()
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.999)
    for _ in range(2):
        scheduler.step()
    assert optimizer.param_groups[0]["betas"] == (0.85, 0.999)


def test_the_first_rate_is_not_skipped_silently() -> None:
    optimizer, _ = optimizers()
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="the first rate of the schedule is skipped"):
        scheduler.step()


WRONG: dict[type[Exception], Any] = {
    DtypeError: {
        "expected an Optimizer, not int": lambda o: lr_scheduler.StepLR(3, 2),
        "number 0 is int": lambda o: lr_scheduler.SequentialLR(o, [3], []),
        "without a metric": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ReduceLROnPlateau(o)]),
    },
    ArgumentError: {
        "group 0 has no 'initial_lr'": lambda o: lr_scheduler.StepLR(o, 2, last_epoch=4),
        "goes on to the next epoch": lambda o: lr_scheduler.StepLR(o, 2).step(4),
        "1 values for 2": lambda o: lr_scheduler.LambdaLR(o, [abs]),
        "between 0 and 1": lambda o: lr_scheduler.ConstantLR(o, 1.5),
        "step_size": lambda o: lr_scheduler.StepLR(o, 0),
        "T_max": lambda o: lr_scheduler.CosineAnnealingLR(o, 0),
        "step_size_up": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=0),
        "div_factor": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5, div_factor=0),
        "final_div_factor": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5, final_div_factor=0.0),
        "start_factor is in": lambda o: lr_scheduler.LinearLR(o, 0.0),
        "T_0": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 0),
        "not negative": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3).step(-1),
        "give total_steps": lambda o: lr_scheduler.OneCycleLR(o, 0.1),
        "positive integer": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=0),
        "pct_start": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5, pct_start=2.0),
        "mode is": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, mode="x"),
        "Adagrad has no momentum": lambda o: lr_scheduler.CyclicLR(
            ddp.optim.Adagrad([ddp.ones(1, requires_grad=True)]), 0.1, 0.2
        ),
        "no schedule": lambda o: lr_scheduler.SequentialLR(o, [], []),
        "1 milestones": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 2)], [3]),
        "not all of one optimizer": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.StepLR(x, 2) for x in (o, optimizers()[0])]
        ),
        "below 1": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=1.0),
        "'min' or 'max'": lambda o: lr_scheduler.ReduceLROnPlateau(o, "low"),
    },
    StateDictError: {
        "LambdaLR: expected a dict, .* got None": lambda o: lr_scheduler.LambdaLR(o, abs).load_state_dict(None),
        r"got \[1\]": lambda o: lr_scheduler.StepLR(o, 2).load_state_dict([1]),
        "got {'lr_lambdas': None}": lambda o: lr_scheduler.LambdaLR(o, abs).load_state_dict({"lr_lambdas": None}),
        r"got {'lr_lambdas': \[{'rate': 2}, ": lambda o: lr_scheduler.LambdaLR(o, [abs, abs]).load_state_dict(
            {"lr_lambdas": [{"rate": 2}] * 2}
        ),
        r"got {'_schedulers': \[3\]}": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.StepLR(o, 2)]
        ).load_state_dict({"_schedulers": [3]}),
    },
    NotImplementedError: {"defines no get_lr": lambda o: lr_scheduler.LRScheduler(o)},
}


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [(wrong, kind, message) for kind, rows in WRONG.items() for message, wrong in rows.items()],
)
def test_wrong_use(wrong: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        wrong(optimizers()[0])


def test_one_cycle_without_a_rise_or_a_fall() -> None:
    for pct_start, expected in ((0.2, [1.0, 0.75, 0.5, 0.25, 0.0]), (1.0, [0.5, 0.625, 0.75, 0.875, 1.0])):
        settings = {"div_factor": 2.0, "final_div_factor": math.inf, "anneal_strategy": "linear"}
        optimizer, _ = optimizers()
        scheduler = lr_scheduler.OneCycleLR(optimizer, 1.0, 5, pct_start=pct_start, **settings)
        rates = [row[0] for row in sequence(optimizer, scheduler, 5)]
        assert rates == pytest.approx(expected)


def test_one_cycle_ends() -> None:
    optimizer, _ = optimizers()
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    sequence(optimizer, scheduler, 3)
    with pytest.raises(ArgumentError, match="step 4 of 3"):
        scheduler.step()
