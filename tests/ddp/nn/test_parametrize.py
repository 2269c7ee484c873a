"""Parametrized tensors beside PyTorch's: values, gradients, paths, and training from a state dict."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from ddp import nn
from ddp.errors import ArgumentError
from tests.ddp.nn.against_torch import assert_same_state

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm` is deprecated")

LAYERS = {
    "linear": lambda t: t.nn.Linear(4, 3),
    "conv": lambda t: t.nn.Conv1d(2, 3, 3),
    "transposed": lambda t: t.nn.ConvTranspose1d(2, 3, 3),
}
INPUTS = {"linear": (5, 4), "conv": (5, 2, 7), "transposed": (5, 2, 7)}
NORMS = {
    "weight": lambda t, m: t.nn.utils.parametrizations.weight_norm(m),
    "weight-1": lambda t, m: t.nn.utils.parametrizations.weight_norm(m, dim=1),
    "weight-all": lambda t, m: t.nn.utils.parametrizations.weight_norm(m, dim=None),
    "weight-negative": lambda t, m: t.nn.utils.parametrizations.weight_norm(m, dim=-2),
    "weight-bias": lambda t, m: t.nn.utils.parametrizations.weight_norm(m, "bias"),
    "spectral": lambda t, m: t.nn.utils.parametrizations.spectral_norm(m, n_power_iterations=2),
    "spectral-1": lambda t, m: t.nn.utils.parametrizations.spectral_norm(m, dim=1, eps=1e-6),
    "old-weight": lambda t, m: t.nn.utils.weight_norm(m),
    "old-weight-all": lambda t, m: t.nn.utils.weight_norm(m, dim=-1),
    "old-spectral": lambda t, m: t.nn.utils.spectral_norm(m, n_power_iterations=2),
    "doubled": lambda t, m: t.nn.utils.parametrize.register_parametrization(m, "bias", doubled(t)),
    "chain": lambda t, m: t.nn.utils.parametrize.register_parametrization(NORMS["weight"](t, m), "weight", doubled(t)),
}


def doubled(t: Any) -> Any:
    class Doubled(t.nn.Module):  # type: ignore[name-defined]
        def forward(self, x: Any) -> Any:
            return 2 * x

        def right_inverse(self, x: Any) -> Any:
            return x / 2

    return Doubled()


def pair(layer: str, norm: str) -> tuple[Any, Any]:
    """One here and one there, with the same numbers."""
    ours, theirs = (NORMS[norm](t, LAYERS[layer](t).double()) for t in (ddp, torch))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def train(t: Any, module: Any, layer: str, steps: int = 3) -> None:
    optimizer = t.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = t.tensor(np.random.default_rng(step).standard_normal(INPUTS[layer]))
        optimizer.zero_grad()
        (module(x) ** 2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_training_goes_on_from_a_state_dict_as_in_pytorch(layer: str, norm: str) -> None:
    ours, theirs = pair(layer, norm)
    train(ddp, ours, layer)
    train(torch, theirs, layer)
    assert_same_state(ours, theirs)
    resumed = pickle.loads(pickle.dumps(ours)) if norm not in ("doubled", "chain") else copy.deepcopy(ours)
    theirs.load_state_dict({path: torch.tensor(x.numpy()) for path, x in resumed.state_dict().items()})
    for t, module in ((ddp, resumed), (torch, theirs)):
        train(t, module, layer)
        module.eval()
    assert_same_state(resumed, theirs)
    x = np.random.default_rng(9).standard_normal(INPUTS[layer])
    expected = theirs(torch.tensor(x)).detach().numpy()
    assert_allclose(resumed(ddp.tensor(x)).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["weight", "spectral", "doubled", "chain"])
@pytest.mark.parametrize("leave", [True, False])
def test_removing_parametrizations(norm: str, leave: bool) -> None:
    ours, theirs = (each.eval() for each in pair("linear", norm))
    name = "bias" if norm == "doubled" else "weight"
    modules = ((ddp, ours), (torch, theirs))
    if norm in ("weight", "chain") and not leave:
        for t, module in modules:
            with pytest.raises(ValueError, match="leave_parametrized=False"):
                t.nn.utils.parametrize.remove_parametrizations(module, name, leave)
        return
    for t, module in modules:
        assert t.nn.utils.parametrize.is_parametrized(module)
        assert t.nn.utils.parametrize.is_parametrized(module, name)
        assert t.nn.utils.parametrize.remove_parametrizations(module, name, leave) is module
        assert not t.nn.utils.parametrize.is_parametrized(module)
        module.train()
        train(t, module, "linear")
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("norm", ["weight", "spectral"])
def test_removing_the_older_form(norm: str) -> None:
    ours, theirs = (each.eval() for each in pair("conv", f"old-{norm}"))
    for t, module in ((ddp, ours), (torch, theirs)):
        remove = getattr(t.nn.utils, f"remove_{norm}_norm")
        remove(module)
        train(t, module, "conv")
        with pytest.raises(ValueError, match="weight"):
            remove(module)
    assert_same_state(ours, theirs)


def test_a_computed_tensor_is_not_assigned_to() -> None:
    module = NORMS["weight"](ddp, nn.Linear(4, 3))
    for value in (ddp.ones(3, 4), nn.Parameter(ddp.ones(3, 4))):
        with pytest.raises(ArgumentError, match="'weight' is computed"):
            module.weight = value


def test_inside_cached_a_tensor_is_computed_once() -> None:
    module = NORMS["weight"](ddp, nn.Linear(4, 3))
    assert module.weight is not module.weight
    with nn.utils.parametrize.cached():
        with nn.utils.parametrize.cached():
            first = module.weight
        assert module.weight is first
        with nn.utils.parametrize.cached():
            assert module.weight is first
        assert module.weight is first
        module(ddp.ones(2, 4)).sum().backward()
    assert module.parametrizations.weight.original0.grad is not None
    assert module.weight is not first


@pytest.mark.parametrize("norm", ["weight", "spectral", "old-weight", "old-spectral"])
def test_ranks_train_the_originals_alike(norm: str) -> None:
    module, _ = pair("linear", norm)
    alone = copy.deepcopy(module)
    train(ddp, alone, "linear")

    def rank(comm: Any) -> Any:
        model = ddp.DataParallel(copy.deepcopy(module), comm)
        train(ddp, model, "linear")
        return model.module

    for trained in collectives.run_threads(rank, size=2):
        assert_same_state(trained, alone)


class Growing(nn.Module):
    def forward(self, x: Any) -> Any:
        return ddp.cat([x, x])


def test_what_cannot_be_parametrized() -> None:
    register = nn.utils.parametrize.register_parametrization
    module = nn.Linear(3, 2, bias=False)
    before = module.weight
    for name in ("bias", "wieght"):
        with pytest.raises(ArgumentError, match=f"no parameter '{name}'"):
            register(module, name, doubled(ddp))
    assert module.weight is before
    assert register(module, "weight", Growing(), unsafe=True).weight.shape == (4, 3)
    with pytest.raises(ArgumentError, match="'bias' is not parametrized"):
        nn.utils.parametrize.remove_parametrizations(module, "bias")
    with pytest.raises(IndexError):
        nn.utils.weight_norm(nn.Linear(3, 2), dim=5)
