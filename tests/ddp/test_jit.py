"""Compilers by name: what they are given comes back, and it is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.errors import warn_once

FORMS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda f: ddp.compile(f),
    "compile with arguments": lambda f: ddp.compile(f, mode="max-autotune", fullgraph=True, dynamic=False),
    "a decorator": lambda f: ddp.compile(backend="inductor")(f),
    "script": lambda f: ddp.jit.script(f, example_inputs=[(1,)]),
    "trace": lambda f: ddp.jit.trace(f, (ddp.ones(1),), check_trace=False),
    "ignore": ddp.jit.ignore,
    "ignore with arguments": lambda f: ddp.jit.ignore(drop=True)(f),
    "unused": ddp.jit.unused,
    "export": ddp.jit.export,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:ddp.compile")
def test_what_is_given_comes_back(form: str) -> None:
    module = ddp.nn.Linear(1, 1)
    assert FORMS[form](module) is module
    assert FORMS[form](abs) is abs
    assert not ddp.jit.is_scripting()


def test_it_is_said_once_where_the_user_calls() -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"compile nothing.*graphed_step") as said:
        ddp.compile(abs)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp.compile(abs)
        ddp.jit.script(abs)
