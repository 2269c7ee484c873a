"""The version, as scripts written for PyTorch read it."""

from __future__ import annotations

import operator
from typing import Any

import pytest

import collectives
import ddp

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


@pytest.mark.parametrize("other", ["1.13", "1.10.0a0", "2", "2.0", "2.4.1+cu118", "2.13", "3", (1, 9), (2, 4), (2, 14)])
def test_it_is_ordered_as_that_of_pytorch(other: Any) -> None:
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq):
        assert compare(ddp.__version__, other) == compare(torch.__version__, other), compare
    assert int(ddp.__version__.split(".")[0]) == 2


def test_it_is_the_oracles_and_has_ours_behind_the_plus() -> None:
    release, _, ours = ddp.__version__.partition("+ddp.")
    assert release == torch.__version__.partition("+")[0]
    assert ours == collectives.__version__
    version = pytest.importorskip("packaging.version")
    assert version.parse(ddp.__version__) >= version.parse("2.13")
