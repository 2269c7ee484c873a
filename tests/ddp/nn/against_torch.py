"""Layers and functions beside PyTorch's: values, and gradients of inputs and parameters, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp

try:
    import torch
except ImportError:  # Each file that imports this one skips itself then: see tests/conftest.py.
    torch = None


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def flat(results: Any) -> list[Any]:
    """The tensors of nested tuples."""
    if isinstance(results, tuple):
        return [x for result in results for x in flat(result)]
    return [] if results is None else [results]


def run(t: Any, f: Callable[..., Any], arrays: Any, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The results of f, and the gradients of the arrays and of its parameters for one random gradient each."""
    leaves = [t.tensor(array, requires_grad=array.dtype.kind == "f") for array in arrays]
    named = {key: t.tensor(value) if isinstance(value, np.ndarray) else value for key, value in options.items()}
    # Not the leaves themselves: a layer may write into its input.
    results = flat(f(*[x * 1 if x.requires_grad else x for x in leaves], **named))
    for p in (parameters := list(f.parameters()) if isinstance(f, t.nn.Module) else []):
        p.grad = None
    tracked = [(i, y) for i, y in enumerate(results) if y.requires_grad]
    for i, y in tracked:
        g = numbers(*y.shape, seed=i + 1).astype(str(y.dtype).removeprefix("torch."))
        y.backward(t.tensor(g), retain_graph=len(tracked) > 1)
    return results, [x.grad for x in (*leaves, *parameters)]


def agree(ours: Any, theirs: Any, *arrays: Any, rtol: float = 1e-9, atol: float = 1e-12, **options: Any) -> Any:
    """Both on the same arrays, of which floating ones get gradients; returns our results. options: may hold arrays."""
    (results, gradients), (expected, references) = run(ddp, ours, arrays, options), run(torch, theirs, arrays, options)
    for y, z in zip(results, expected, strict=True):
        assert (y.shape, y.dtype.name) == (tuple(z.shape), str(z.dtype).removeprefix("torch."))
    for y, z in zip(results + gradients, expected + references, strict=True):
        assert (y is None) == (z is None)
        if y is not None:
            assert_allclose(y.detach().numpy(), z.detach().numpy(), rtol, atol)
    return results


def agree_as_functions(name: str, *arrays: Any, rtol: float = 1e-9, atol: float = 1e-12, **options: Any) -> None:
    """`nn.functional.name` of both."""
    pair = (getattr(t.nn.functional, name) for t in (ddp, torch))
    agree(*pair, *arrays, rtol=rtol, atol=atol, **options)


def twins(name: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Our layer and PyTorch's with the same text, names and weights, in float64."""
    torch.manual_seed(0)
    ours, theirs = (getattr(t.nn, name)(*args, **options).double() for t in (ddp, torch))
    assert repr(ours) == repr(theirs)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    state = {key: value.numpy() for key, value in theirs.state_dict().items()}
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == [(k, v.shape) for k, v in state.items()]
    ours.load_state_dict(state)
    return ours, theirs


def check_layer(name: str, args: Any, options: Any, *shapes: tuple[int, ...]) -> None:
    """The layer prints, remembers and computes as PyTorch's."""
    agree(*twins(name, *args, **options), *(numbers(*shape, seed=i) for i, shape in enumerate(shapes)))


def check_refusals(refused: dict[type[Exception], dict[str, Callable[..., Any]]], *args: Any) -> None:
    """Each call, by an error and a part of its text, raises that. args: what all of them take."""
    for error, calls in refused.items():
        for text, call in calls.items():
            with pytest.raises(error, match=text):
                call(*args)


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Two modules, of either library, have the same state dict up to rounding in float64."""
    state = ours.state_dict()
    expected = theirs.state_dict()
    assert list(state) == list(expected)
    for path, value in expected.items():
        assert_allclose(state[path].numpy(), value.numpy(), rtol=1e-12, atol=1e-12, err_msg=path)
