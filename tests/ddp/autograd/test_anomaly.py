"""Anomaly mode names the forward line of the op whose gradient is nan."""

from __future__ import annotations

import pytest

import ddp
from ddp.autograd import detect_anomaly, set_detect_anomaly
from ddp.errors import AnomalyError


def bad(x: ddp.Tensor) -> ddp.Tensor:
    y = x - x.detach()
    root = y.sqrt()  # here
    return (root * 0).sum()


def test_it_names_the_line() -> None:
    x = ddp.ones(2, requires_grad=True)
    with detect_anomaly(), pytest.raises(AnomalyError, match=r"sqrt: .*shape \(2,\).*test_anomaly.py:\d+ in bad: root"):
        bad(x).backward()
    bad(x).backward()  # outside of it nothing is checked


def test_as_a_statement_and_a_decorator() -> None:
    x = ddp.ones(2, requires_grad=True)
    set_detect_anomaly(True)
    try:
        with pytest.raises(AnomalyError):
            bad(x).backward()
    finally:
        set_detect_anomaly(False)
    bad(x).backward()
    with pytest.raises(AnomalyError):
        detect_anomaly()(lambda: bad(x).backward())()
    bad(x).backward()
    with detect_anomaly(check_nan=False):
        bad(x).backward()


def test_an_op_that_ran_before() -> None:
    y = bad(ddp.ones(2, requires_grad=True))
    with detect_anomaly(), pytest.raises(AnomalyError, match="outside anomaly mode"):
        y.backward()
