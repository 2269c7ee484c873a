"""What tensors and their functions do not take: the call, the error, and what its message names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, GraphError, InplaceError, RangeError, ShapeError

F = ddp.nn.functional
X = ddp.arange(12.0).reshape(3, 4)
I = ddp.tensor([0, 2])  # noqa: E741  # an index

# By the error and its message; each takes a tensor of shape (2, 3, 4).
CALLS: dict[type[Exception], Any] = {
    RangeError: {
        r"size: dimension 2 of shape \(2, 3\)": lambda x: ddp.zeros(2, 3).size(2),
        r"sum: dimension 2 of shape \(2, 3\)": lambda x: ddp.zeros(2, 3).sum(2),
        r"shape \(2, 3\): index 2 is out of bounds": lambda x: ddp.zeros(2, 3)[2],
        "expected -3 to 2": lambda x: ddp.zeros(2, 3).unsqueeze(3),
        r"2 \+ 2 elements": lambda x: x.narrow(1, 2, 2),
        "index 3 in dimension 1": lambda x: x.select(1, 3),
        r"k=5 of dimension 1 of shape \(3, 4\)": lambda x: X.topk(5),
        "k=0": lambda x: X.kthvalue(0),
        "is below 0": lambda x: ddp.tensor([-1]).bincount(),
        r"index 3 is out of range for 3 .*\(3, 4\)": lambda x: X.gather(0, ddp.tensor([[3]])),
        "index 12": lambda x: X.take(ddp.tensor([12])),
    },
    ArgumentError: {
        "all": lambda x: bool(ddp.tensor([1.7, -2.2, 0.0])),
        "300 does not fit uint8": lambda x: ddp.full((2,), 300, dtype=ddp.uint8),
        "without a copy": lambda x: ddp.asarray(np.zeros(3, np.float32), dtype=ddp.float64, copy=False),
        "a tensor on the CPU has no stream": lambda x: ddp.zeros(3).__dlpack__(stream=1),
        "LongTensor: expected sizes, or one sequence of data, got 2": lambda x: ddp.LongTensor([1], [2]),
        "tensordot: -1 dimensions of shapes": lambda x: ddp.tensordot(ddp.zeros(2), ddp.zeros(2), -1),
        r"sizes \(6,\) and, by name, \(2, 3\)": lambda x: ddp.arange(6).reshape(6, shape=(2, 3)),
        "sum: axis and dim are one argument": lambda x: ddp.ones(2).sum(dim=0, axis=0),
        "default, short, full": lambda x: ddp.set_printoptions(profile="long"),
        "twice": lambda x: ddp.zeros(2, 3).amax((0, -2)),
        "the step must be greater than zero; use flip()": lambda x: x[[0, 1], ::-1],
        "no integer": lambda x: ddp.randint(3, 3, (1,)),
        r"uint8 holds, 0 to 255, got \[-1, 3\)": lambda x: ddp.randint(-1, 3, (1,), dtype=ddp.uint8),
        r"float16 holds all integers below 2049": lambda x: ddp.randperm(2050, dtype=ddp.float16),
        r"float16 holds, .* got \[0, 70000\)": lambda x: ddp.zeros(2, dtype=ddp.float16).random_(70000),
        r"no integer is in \[0, 0\)": lambda x: ddp.zeros(2).random_(0),
        "size": lambda x: ddp.normal(0.0, 1.0),
        r"outside \[0, 1\]": lambda x: ddp.bernoulli(ddp.zeros(2), 1.5),
        "not positive": lambda x: ddp.empty(20000, dtype=ddp.float64).exponential_(4.0).exponential_(0),
        "45 bytes, got 3": lambda x: ddp.set_rng_state(ddp.zeros(3, dtype=ddp.uint8)),
        "no element": lambda x: ddp.zeros(0, 2).argmax(),
        "^pow: .* negative": lambda x: ddp.tensor([2]) ** ddp.tensor([-1]),
        "^add: .* 300 out of bounds": lambda x: ddp.tensor([1], dtype=ddp.uint8) + 300,
        "^fill_: .* 300 out of bounds": lambda x: ddp.tensor([1], dtype=ddp.uint8).fill_(300),
        "'trunc' or 'floor', not 'up'": lambda x: ddp.div(ddp.ones(1), 2, rounding_mode="up"),
        r"div: \(1,\) / 0, of int64: division by zero": lambda x: ddp.tensor([1]) // 0,
        r"remainder: \(1,\) / \(2, 1\), of int64": lambda x: ddp.tensor([1]) % ddp.tensor([[2], [0]]),
        "min, max": lambda x: ddp.ones(2).clamp_(),
        "after end_dim": lambda x: x.flatten(2, 1),
        r"\(0, 1\) does not name each": lambda x: x.permute(0, 1),
        "as many of both": lambda x: x.movedim((0, 1), 2),
        "pieces of 0": lambda x: x.split(0),
        r"output_size 3 is not 3 \* 2": lambda x: ddp.repeat_interleave(x, 2, 1, output_size=3),
        "expected as many": lambda x: x.roll((1, 2)),
        r"rot90: expected two dimensions, got \(0,\)": lambda x: X.rot90(1, (0,)),
        "'yx'": lambda x: ddp.meshgrid(x[0, 0], indexing="yx"),
        "'wrap'": lambda x: F.pad(x, (1, 1), "wrap"),
        "side": lambda x: ddp.searchsorted(X[0], X, side="left", right=True),
        "'max'": lambda x: X.scatter(0, ddp.tensor([[0]]), X, reduce="max"),
    },
    DtypeError: {
        "0-d": lambda x: len(ddp.tensor(1)),
        "^add_: .* int64": lambda x: ddp.tensor([1]).add_(0.5),
        "complex128": lambda x: ddp.tensor([1j]),
        "only floating": lambda x: ddp.tensor([1], requires_grad=True),
        "float31": lambda x: ddp.zeros(2, dtype="float31"),
        "NumPy array": lambda x: ddp.from_numpy([1.0]),
        "uint16": lambda x: ddp.from_numpy(np.zeros(2, np.uint16)),
        "complex64": lambda x: ddp.from_dlpack(np.zeros(2, np.complex64)),
        "float32 and float64": lambda x: ddp.zeros(2, 3) @ ddp.zeros(3, 2, dtype=ddp.float64),
        "^mean: .* int64": lambda x: ddp.arange(3).mean(),
        "are floating, not int64": lambda x: ddp.rand(2, dtype=ddp.int64),
        "^exponential_: .* got int64": lambda x: ddp.ones(2, dtype=ddp.int64).exponential_(),
        "where: the condition is bool": lambda x: ddp.where(ddp.zeros(2), 1.0, 2.0),
        "^neg: ": lambda x: -ddp.tensor([True]),
        "^sub: ": lambda x: ddp.tensor([True]) - ddp.tensor([True]),
        "^invert: ": lambda x: ~ddp.zeros(2),
        "^isclose: .* str": lambda x: ddp.ones(2).isclose("a"),
        "alpha=0.5": lambda x: ddp.add(ddp.tensor([1]), 1, alpha=0.5),
        "positive: bool": lambda x: ddp.positive(ddp.tensor([True])),
        "div_: .* int64": lambda x: ddp.tensor([1]).__itruediv__(2),
        "sequence of tensors": lambda x: ddp.cat(x),
        "float32": lambda x: X[0].bincount(),
        "expected a tensor": lambda x: ddp.isin(1, 2),
        "int64 tensor, not float32": lambda x: X.gather(0, X),
        "masked_fill: the mask is a bool": lambda x: X.masked_fill(X, 0),
        "expected a tensor of float32": lambda x: X.scatter(0, ddp.tensor([[0]]), X.double()),
        "tensor of float32, .* got ndarray": lambda x: X.index_copy(0, I, X[:2].numpy()),
        "bool tensor, not ndarray": lambda x: X.masked_fill(np.array([True]), 0),
    },
    ShapeError: {
        r"add_: shapes \(2, 3\) and \(2,\)": lambda x: ddp.zeros(2, 3).add_(ddp.zeros(2)),
        r"\(4, 2, 3\) does not broadcast to \(2, 3\)": lambda x: ddp.zeros(2, 3).copy_(ddp.zeros(4, 2, 3)),
        "ragged": lambda x: ddp.tensor([[1, 2], [3]]),
        r"\(2,\) has 2 elements": lambda x: ddp.zeros(2).item(),
        "tensordot: .* differ": lambda x: ddp.tensordot(ddp.zeros(2, 3), ddp.zeros(2, 3), 1),
        r"mm: \(2, 3\) @ \(4, 5\)": lambda x: ddp.mm(ddp.zeros(2, 3), ddp.zeros(4, 5)),
        "numbers of matrices differ": lambda x: ddp.bmm(ddp.zeros(1, 2, 3), ddp.zeros(2, 3, 4)),
        "addmm": lambda x: ddp.addmm(ddp.zeros(3, 4), ddp.zeros(2, 3), ddp.zeros(3, 4)),
        r"cdist: shapes .*\(2, 3\).* and .*\(2, 4\)": lambda x: ddp.cdist(ddp.zeros(2, 3), ddp.zeros(2, 4)),
        "do not broadcast": lambda x: ddp.normal(ddp.zeros(2), ddp.ones(3)),
        "^bernoulli_: .* do not broadcast": lambda x: ddp.zeros(2).bernoulli_(ddp.zeros(3)),
        r"^add: shapes \(2, 3\) and \(2,\) do not broadcast: 3 a": lambda x: ddp.zeros(2, 3) + ddp.zeros(2),
        "at most 2": lambda x: ddp.zeros(1, 2, 3).t(),
        r"fill_: expected a number .*shape \(2,\)": lambda x: ddp.ones(2).fill_([1.0, 2.0]),
        r"\(2,\) and \(3,\)": lambda x: ddp.addcmul(ddp.ones(2), ddp.ones(3), ddp.ones(1)),
        r"fill_diagonal_: expected a matrix, got shape \(2,\)": lambda x: ddp.ones(2).fill_diagonal_(1),
        r"\(2, 3, 4\) of 24 elements cannot become \(5, -1\)": lambda x: x.reshape(5, -1),
        r"\(3, 2, 4\).*without a copy": lambda x: x.transpose(0, 1).view(24),
        r"\(2, 3, 4\) cannot be expanded to \(2, 3, 5\)": lambda x: x.expand(2, 3, 5),
        "do not add up to 3": lambda x: x.split([1, 1], 1),
        "are one": lambda x: x.diagonal(0, 1, 1),
        "windows of 4": lambda x: x.unfold(1, 4, 1),
        "element 0 to 24": lambda x: x.as_strided((2, 2), (12, 12)),
        "a number for each dimension": lambda x: x.repeat(2, 2),
        r"\(2,\) for 3": lambda x: x.repeat_interleave(ddp.tensor([1, 2]), 1),
        "vector or a matrix": lambda x: x.diag(),
        r"\(2, 3, 4\) and \(2, 2, 4\)": lambda x: ddp.cat([x, x[:, :2]]),
        "stack: .* differ": lambda x: ddp.stack([x, x[0]]),
        "too wide": lambda x: F.pad(x, (4, 0), "reflect"),
        "below nothing": lambda x: F.pad(x, (-3, -2)),
        r"\(2,\) in rows of shape \(3, 4\)": lambda x: ddp.searchsorted(X, I),
        "dimensions differ": lambda x: X.gather(0, I),
        "vector": lambda x: X.index_select(0, ddp.tensor([[0]])),
        "0-d": lambda x: X.masked_fill(X > 1, X),
        "does not broadcast": lambda x: X.clone().masked_fill_(ddp.ones(2, 3, 4) > 0, 0),
        "10 places": lambda x: X.masked_scatter(X > 1, X[0]),
        "2 places along dimension 0": lambda x: X.index_add(0, I, X),
        "index_put": lambda x: X.index_put((I,), ddp.zeros(3)),
    },
    GraphError: {"detach": lambda x: (ddp.ones(2, requires_grad=True) * 2).requires_grad_(False)},
    TypeError: {"unsupported operand": lambda x: ddp.zeros(2) + "text"},
    InplaceError: {
        "clamp_ .* leaf": lambda x: ddp.ones(2, requires_grad=True).clamp_(0, 1),
        "masked_fill_ .* leaf": lambda x: x.requires_grad_().masked_fill_(x > 1, 0),
        "no gradient pass": lambda x: ddp.exp(x, out=ddp.ones(2, requires_grad=True)),
    },
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [(call, error, message) for error, rows in CALLS.items() for message, call in rows.items()],
)
def test_an_error_says_what_was_wrong(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(ddp.arange(24.0).reshape(2, 3, 4).clone())
