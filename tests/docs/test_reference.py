"""The API reference of the site: each public name is on a page, and docstrings become lists of parameters."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest

import ddp
from tests.conftest import ROOT

sys.path.append(str(ROOT / "docs"))

docstrings = importlib.import_module("docstrings")
reference = importlib.import_module("reference")

SCRIPT_ONLY = {"return_types", "utils"}  # names that PyTorch's scripts import, documented in docs/from-pytorch.md


@pytest.mark.parametrize(
    ("docstring", "parameters", "expected"),
    [
        ("What it does.\n\nMore *of* it_.", "", ["What it does.", "More \\*of\\* it\\_."]),
        (
            "x: one\ny: two, which\ngoes on",
            "x y",
            [":Parameters:", "    - **x** -- one", "    - **y** -- two, which goes on"],
        ),
        ("a, b: both", "a b", [":Parameters:", "    - **a**, **b** -- both"]),
        (
            "Sums. input: (N,), dim: which",
            "input dim",
            ["Sums.", ":Parameters:", "    - **input** -- (N,)", "    - **dim** -- which"],
        ),
        (
            "n: some `a; n: b` code\nThis is said of all.",
            "n",
            [":Parameters:", "    - **n** -- some `a; n: b` code", "This is said of all."],
        ),
        (
            "Zero. Raises: ShapeError, or\nanother. Source: a paper.",
            "",
            ["Zero.", ":Raises: ShapeError, or another.", ":Source: a paper."],
        ),
        ("It is so: no list.\nagain: none", "", ["It is so: no list. again: none"]),
        ("As here:\n\n    f(x: y)\n\nReturns: it", "x", ["As here:", "::", "    f(x: y)", ":Returns: it"]),
    ],
)
def test_docstring(docstring: str, parameters: str, expected: list[str]) -> None:
    assert docstrings.plain_text(docstring, parameters.split()).strip().split("\n\n") == expected


def test_what_is_no_parameter_of_a_class_is_an_attribute() -> None:
    assert docstrings.plain_text("rank: of this process", ["comm"], of_class=True).startswith(":Attributes:")


def test_every_public_module_and_name_has_a_page() -> None:
    modules = {name for name in ddp.__all__ if inspect.ismodule(getattr(ddp, name))} - SCRIPT_ONLY
    assert {f"ddp.{name}" for name in modules} <= set(reference.MODULES)
    pages = reference.pages()
    entries = re.findall(r"^\.\. auto(?:class|exception|function):: (.*)$", "\n".join(pages.values()), re.M)
    for module in reference.MODULES:
        for name in reference.documented(module):
            assert f"{reference.documented_in(module, name)}.{name}" in entries
    assert len(entries) == len(set(entries)), "a name is documented twice"
