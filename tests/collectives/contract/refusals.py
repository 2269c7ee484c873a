"""What every backend owes of arguments that mean nothing: an error that says what should be, and no harm done."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.errors import CollectivesError
from tests.collectives.contract.run import assert_usable, on_every_rank

X = np.ones(3)
ZERO_D = np.float64(1)
ROOT = r"ArgumentError: root should be a rank from 0"
LENGTHS = "ArgumentError: lengths should be"
OUT = "ArgumentError: out should be"
OP = "ArgumentError: op should be one of sum, mean, max, min, prod"
DST = "ArgumentError: dst should be a rank from 0 to"
SRC = "ArgumentError: src should be None, for any, or a rank from"
TAG = "ArgumentError: tag should be a number from 0 to 2147483647"
OBJECTS = "ArgumentError: objects should be a list of"
SHAPE = "ArgumentError: shape should be lengths of at least 0"
MEMBERS = "ArgumentError: .*ranks should name each member once, the calling rank among"
TIMEOUT = "ArgumentError: timeout should be seconds above 0"
COLOR = "ArgumentError: .*should be a whole number of 64 bits or None"

REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda comm: comm.all_reduce("x"), "DtypeError: x should be an array, is str"),
    (lambda comm: comm.all_reduce(np.array([object()])), "DtypeError: .*dtype is object"),
    (lambda comm: comm.all_reduce(X * 1j, "max"), "DtypeError: .*max of complex128"),
    (lambda comm: comm.all_reduce(X, "average"), OP),
    (lambda comm: comm.all_reduce(X, out=np.ones(4)), rf"{OUT} float64 \(3,\), is float64 \(4,\)"),
    (lambda comm: comm.all_reduce(X, out=np.ones(3, np.float32)), rf"{OUT} .* is float32"),
    (lambda comm: comm.all_reduce(X.astype(int), scale=0.5), "DtypeError: scale needs a floating"),
    (lambda comm: comm.all_reduce(X, order="ring"), "ArgumentError: order should be 'tree' or None, is 'ring'"),
    (lambda comm: comm.reduce(X, root=comm.size), rf"{ROOT} to \d"),
    (lambda comm: comm.reduce_scatter(ZERO_D), "ArgumentError: .*splits axis 0, and x is 0-d"),
    (lambda comm: comm.reduce_scatter(X, out=np.ones(9)), OUT),
    (lambda comm: comm.reduce_scatter(X > 0), "DtypeError: .*sum of bool"),
    (lambda comm: comm.broadcast(X, root=-1), ROOT),
    (lambda comm: comm.gather(X, root=0.0), ROOT),
    (lambda comm: comm.all_gather(X, lengths=[1] * (comm.size + 1)), LENGTHS),
    (lambda comm: comm.all_gather(X, lengths=[2] * comm.size), "ArgumentError: .*but x has 3 rows"),
    # What is found out only after an exchange leaves the order of calls intact.
    (lambda comm: comm.all_gather(X, out=np.ones(1)), OUT),
    (lambda comm: comm.all_to_all(ZERO_D), "ArgumentError: all_to_all splits axis 0, and x is 0-d"),
    (lambda comm: comm.all_to_all(X[:0], lengths=[1] * comm.size), r"ArgumentError: .*add up to \d, x has 0 rows"),
    (lambda comm: comm.all_to_all(X, lengths="even"), LENGTHS),
    (lambda comm: comm.all_to_all(X, out=np.ones(9 * comm.size)), OUT),
    (lambda comm: comm.all_to_all(X, out_lengths=[1] * (comm.size + 1)), "ArgumentError: out_lengths should be"),
    (lambda comm: comm.broadcast_object(0, comm.size), ROOT),
    (lambda comm: comm.scatter_object([0] * comm.size, comm.size), ROOT),
    (lambda comm: comm.scatter_object([0] * (comm.size + 1), comm.rank), OBJECTS),
    (lambda comm: comm.scatter_object(None, comm.rank), OBJECTS),
    (lambda comm: comm.send("text", 0), "DtypeError"),
    (lambda comm: comm.send(X, comm.size), DST),
    (lambda comm: comm.send(X, None), DST),
    (lambda comm: comm.send(X, 0, tag=-1), TAG),
    (lambda comm: comm.send(X, 0, tag="x"), TAG),
    (lambda comm: comm.recv(comm.size), SRC),
    (lambda comm: comm.recv(0, tag=2**31), TAG),
    (lambda comm: comm.empty(-1), SHAPE),
    (lambda comm: comm.empty(None), SHAPE),
    (lambda comm: comm.empty(2, "U3"), "DtypeError"),
    (lambda comm: comm.empty(2, object), "DtypeError"),
    (lambda comm: comm.create_group([comm.rank, comm.rank]), MEMBERS),
    (lambda comm: comm.create_group([(comm.rank + 1) % comm.size] * (comm.size > 1)), MEMBERS),
    (lambda comm: comm.create_group([comm.rank, comm.size]), "ArgumentError: ranks should hold ranks from 0 to"),
    (lambda comm: comm.create_group([comm.rank], timeout=0), TIMEOUT),
    (lambda comm: comm.split(0, timeout=math.nan), TIMEOUT),
    (lambda comm: comm.barrier(timeout=0), TIMEOUT),
    (lambda comm: comm.split(0, timeout="7"), TIMEOUT),
    (lambda comm: comm.split("red"), COLOR),
    (lambda comm: comm.split(0, 2**63), COLOR),
]


def refusal(call: Callable[[Any], object], comm: Communicator) -> str:
    try:
        call(comm)
    except CollectivesError as error:
        return f"{type(error).__name__}: {error}"
    return "it was accepted"


class RefusalsContract:
    @on_every_rank
    def test_arguments_that_mean_nothing_are_refused_on_every_rank(self, comm: Communicator) -> None:
        refused = [(words, refusal(call, comm)) for call, words in REFUSED]
        assert [(words, said) for words, said in refused if not re.match(words, said, re.DOTALL)] == []
        assert_usable(comm)
