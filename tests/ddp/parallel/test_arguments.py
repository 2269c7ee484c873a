"""What DataParallel is asked for is checked before anything is changed; what was refused leaves the module alone."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, GraphError, ParallelError
from ddp.parallel import DataParallel, comm_hooks
from tests.ddp.parallel.ranks import make_net, on_ranks


@pytest.mark.parametrize("make", [nn.ReLU, lambda: nn.Linear(2, 2).requires_grad_(False), nn.Sequential])
def test_a_model_without_trained_parameters_is_refused(make: Callable[[], nn.Module]) -> None:
    net = make()
    with pytest.raises(ParallelError, match="no parameter of this module requires grad: there is nothing to reduce"):
        DataParallel(net)
    for p in net.parameters():
        p.requires_grad_(True)
    if list(net.parameters()):
        DataParallel(net).close()  # the refusal left nothing behind


@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half, lambda net: net.to(ddp.bfloat16)])
def test_converting_after_wrapping_changes_nothing_and_says_what_to_do(convert: Callable[[nn.Module], Any]) -> None:
    model = DataParallel(make_net())
    for target in (model, model.module):
        with pytest.raises(GraphError, match="convert before wrapping"):
            convert(target)
    assert {p.dtype for p in model.parameters()} == {ddp.float64}
    for p in model.parameters():
        p.data = p.data * 2  # another array of the same kind is no conversion
    model(ddp.ones(2, 3, dtype=ddp.float64)).sum().backward()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"bucket_cap_mb": 0},
        ArgumentError,
        'buckets hold a finite number of MiB above 0, or "auto" for the cap; got 0 and 1.0',
    ),
    ({"bucket_cap_mb": 1e308}, ArgumentError, "got 1e+308 and 1.0"),
    ({"bucket_cap_mb": "25"}, ArgumentError, "got '25' and 1.0"),
    ({"bucket_cap_mb": None}, ArgumentError, "got None and 1.0"),
    ({"first_bucket_mb": -1.0}, ArgumentError, "got 'auto' and -1.0"),
    ({"broadcast_buffers": "mean"}, ArgumentError, "broadcast_buffers is True or False, got 'mean'"),
    ({"check_every": -1}, ArgumentError, "check_every is a whole number of at least 0, got -1"),
    ({"check_finite": "yes"}, ArgumentError, "check_finite is True or False, got 'yes'"),
    ({"plan": 3}, ParallelError, "expected what `model.plan` or `model.plan.state"),
    ({"comm": [0]}, DtypeError, "comm is the ranks' communicator, or None for collectives.init(), got [0]"),
    ({"comm_hook": 3}, ArgumentError, "comm_hook should be a function"),
    (
        {"comm_hook": comm_hooks.TopK},
        ArgumentError,
        "comm_hook should be a function of a GradBucket, or an object like one, is <class",
    ),
    ({"bucket_size": 3}, TypeError, "unexpected keyword argument 'bucket_size'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
def test_wrong_arguments_are_named_and_leave_the_module_as_it_was(
    wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    net = make_net()
    with pytest.raises(kind) as caught:
        DataParallel(net, **wrong)
    assert message in str(caught.value)
    DataParallel(net)


def test_a_part_of_a_wrapped_model_is_refused_with_what_to_do() -> None:
    net = make_net()
    DataParallel(net)  # nobody holds it
    gc.collect()
    with pytest.raises(ParallelError, match=r"weight is already part of .* lost, wrap a copy, copy\.deepcopy"):
        DataParallel(net[0])
    model = DataParallel(copy.deepcopy(net[0]))  # which is what was advised
    model(ddp.ones(2, 3, dtype=ddp.float64)).sum().backward()
    assert net[0].weight.grad is None
    assert model.module.weight.grad is not None


@pytest.mark.parametrize("of_the_wrapper", [False, True])
def test_a_model_is_wrapped_again_as_by_a_cell_that_runs_twice(of_the_wrapper: bool) -> None:
    net = make_net()
    hook = comm_hooks.TopK()  # it serves one model at a time
    x = ddp.ones(2, 3, dtype=ddp.float64)
    first = DataParallel(net, comm_hook=hook)
    first(x).sum().backward()
    second = DataParallel(first if of_the_wrapper else net, comm_hook=hook)
    assert net[0].weight.grad is None
    assert second.module is net
    assert list(second.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    second(x).sum().backward()
    assert net[0].weight.grad is not None
    uses: list[Callable[[], Any]] = [
        lambda: first(x),
        lambda: first.backward(net(x).sum(), weight=1),
        lambda: first.no_sync().__enter__(),
        lambda: first.join().__enter__(),
        lambda: setattr(first, "require_backward_grad_sync", False),
        lambda: first.plan_state(),
    ]
    for use in uses:
        with pytest.raises(ParallelError, match="was replaced: its module was wrapped again"):
            use()
    first.close()
    second(x).sum().backward()


def test_a_model_is_not_wrapped_again_while_it_is_in_use() -> None:
    net = make_net()
    model = DataParallel(net)
    net[0].weight.register_hook(lambda g: DataParallel(net) and None)
    with pytest.raises(ParallelError, match="inside its backward"):
        model(ddp.ones(2, 3, dtype=ddp.float64)).sum().backward()


def test_a_wrapping_that_fails_leaves_the_first_wrapper() -> None:
    net = make_net()
    model = DataParallel(net)
    with pytest.raises(ParallelError):
        DataParallel(net, plan=DataParallel(nn.Linear(1, 1)).plan)
    model(ddp.ones(2, 3, dtype=ddp.float64)).sum().backward()


def test_a_hook_that_is_a_module_is_no_part_of_the_model() -> None:
    class Learned(nn.Linear):
        def forward(self, bucket: comm_hooks.GradBucket) -> Any:
            return comm_hooks.bf16(bucket)

    net = make_net()
    hook = Learned(2, 2)
    model = DataParallel(net, comm_hook=hook)
    assert model.comm_hook is hook
    assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    assert len(list(model.parameters())) == len(list(net.parameters()))


def test_what_is_wrapped_is_a_module() -> None:
    for wrong in (lambda x: x, nn.Linear, None, [nn.Linear(2, 2)]):
        with pytest.raises(DtypeError, match="expected a Module to wrap"):
            DataParallel(wrong)


def with_buffer(net: nn.Sequential, writeable: bool) -> nn.Sequential:
    array = np.zeros(2)
    array.flags.writeable = writeable
    net.register_buffer("fixed", ddp.from_numpy(array))
    return net


def twins(change: Callable[[nn.Sequential], nn.Module]) -> Callable[[int], dict[str, Any]]:
    """The net, changed on rank 1."""
    return lambda rank: {"module": change(make_net()) if rank == 1 else make_net()}


def setting(option: str, value: Any, elsewhere: Any) -> Callable[[int], dict[str, Any]]:
    return lambda rank: {"module": make_net(), option: elsewhere if rank == 1 else value}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (twins(lambda net: nn.Sequential(*net[:2], nn.Linear(4, 3).double())), r"float64 \(2, 4\) on rank 0, but"),
        (twins(lambda net: nn.Sequential(*net[:2], nn.Linear(4, 2))), r"but 2\.weight float32 \(2, 4\) on rank 1"),
        (twins(lambda net: net[:2]), "but missing on rank 1"),
        (twins(lambda net: net.requires_grad_(False)), r"0\.weight .* without grad on rank 1"),
        (lambda rank: {"module": with_buffer(make_net(), rank != 1)}, "fixed .*, read-only on rank 1"),
        (setting("bucket_cap_mb", "auto", 2.0), "bucket_cap_mb.*is auto on rank 0, but 2.0 on rank 1"),
        (setting("check_every", 100, 7), "check_every.*is 100 on rank 0, but 7 on rank 1"),
        (setting("check_finite", False, True), "check_finite.*is False on rank 0, but True on rank 1"),
        (setting("broadcast_buffers", True, False), "broadcast_buffers.*is True on rank 0, but False on rank 1"),
        (setting("comm_hook", None, print), "comm_hook.*is None on rank 0, but print on rank 1"),
        (
            lambda rank: {"module": make_net(), "comm_hook": comm_hooks.PowerSGD(1 + rank)},
            "comm_hook.*matrix_approximation_rank is 1 on rank 0, but 2 on",
        ),
        (
            lambda rank: {"module": make_net(), "comm_hook": comm_hooks.TopK(0.1 if rank else 0.5)},
            "comm_hook.*TopK: ratio is 0.5 on rank 0, but 0.1 on",
        ),
    ],
)
def test_what_differs_between_ranks_is_named_on_all(make: Callable[[int], dict[str, Any]], message: str) -> None:
    """Every rank raises the same, and the ranks can wrap a model afterwards."""

    def rank(comm: Communicator) -> str:
        with pytest.raises(ParallelError, match=message) as caught:
            DataParallel(comm=comm, **make(comm.rank))
        DataParallel(make_net(), comm)
        return str(caught.value)

    assert len(set(on_ranks(rank, 3))) == 1


def test_arguments_of_pytorch_that_change_nothing_give_one_warning_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallel(make_net(), device_ids=[0], output_device=0, find_unused_parameters=True, static_graph=True)
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    for name in ("device_ids", "output_device", "find_unused_parameters", "static_graph"):
        assert name in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(make_net(), device_ids=None, find_unused_parameters=False, static_graph=False)
