"""What stands for another package in the jobs that tests start is that package, as far as they use it."""

from __future__ import annotations

import importlib.util

import pytest
from numpy.testing import assert_array_equal

from tests.conftest import STANDINS


def test_the_digits_are_those_of_scikit_learn() -> None:
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    spec = importlib.util.spec_from_file_location("standin", STANDINS / "sklearn" / "datasets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours = module.load_digits()
    for name in ("data", "images", "target"):
        assert_array_equal(getattr(ours, name), theirs[name])
        assert getattr(ours, name).dtype == theirs[name].dtype
