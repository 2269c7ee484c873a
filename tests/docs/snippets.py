"""Running a snippet of a page: the names that it uses without making them are there, the same for either library."""

from __future__ import annotations

import ast
import symtable
import threading
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import numpy as np

import collectives
import ddp

Builder = Callable[[Callable[[str], Any]], Any]  # makes a name's value; is given what gives the other names
Array = np.ndarray[Any, Any]

# Python 3.11 counts the depth of what it parses for all threads together: two at a time are a SystemError.
_parsing = threading.Lock()


def samples(rank: int) -> tuple[Array, Array]:
    """(8, 64) float32 and their classes (8,), others on every rank."""
    rng = np.random.default_rng(1000 + rank)
    return rng.normal(size=(8, 64)).astype(np.float32), rng.integers(0, 10, 8)


def weights(shape: tuple[int, ...]) -> Array:
    """A layer's first weights, the same in both libraries, which draw theirs in different ways."""
    return np.random.default_rng(sum(shape)).normal(scale=0.1, size=shape).astype(np.float32)


def start_alike(t: Any) -> Callable[[Any], None]:
    """Of ddp or PyTorch: what goes in the place of `Linear.reset_parameters`."""

    def reset(layer: Any) -> None:
        with t.no_grad():
            layer.weight.copy_(t.from_numpy(weights(tuple(layer.weight.shape))))
            layer.bias.copy_(t.from_numpy(weights(tuple(layer.bias.shape))))

    return reset


def builders(t: Any, rank: int) -> dict[str, Builder]:
    """The names that a snippet with ddp and one with PyTorch may use; the module itself is one of them."""
    nn = t.nn
    x, target = samples(rank)

    def batches(get: Any) -> Any:  # one more on each further rank
        parts = [samples(10 * (step + 1) + rank) for step in range(2 + rank)]
        return [(t.from_numpy(x), t.from_numpy(target)) for x, target in parts]

    return {
        t.__name__: lambda get: t,
        "np": lambda get: np,
        "nn": lambda get: nn,
        "F": lambda get: nn.functional,
        "net": lambda get: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        "optimizer": lambda get: t.optim.SGD(get("model").parameters(), lr=0.1, momentum=0.9),
        "x": lambda get: t.from_numpy(x),
        "t": lambda get: t.from_numpy(target),
        "batches": batches,
        "dataset": lambda get: list(zip(x, target, strict=True)),
    }


def of_ours(comm: Any) -> dict[str, Builder]:
    """All names that a snippet of ours may use."""
    ours: dict[str, Builder] = {
        "collectives": lambda get: collectives,
        "comm": lambda get: comm,
        "model": lambda get: ddp.DataParallel(get("net")),
    }
    return builders(ddp, comm.rank) | ours


def run(code: CodeType, source: str, builders: Mapping[str, Builder]) -> dict[str, Any]:
    """Runs a snippet with the names that it reads and does not make; returns those that it has made, and `model`."""
    uses = _Uses()
    with _parsing:
        tree = ast.parse(source)
    uses.visit(tree)
    namespace: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in namespace:
            namespace[name] = builders[name](get)
        return namespace[name]

    for name in uses.read:
        if name in builders:
            get(name)
    exec(code, namespace)
    return {name: value for name, value in namespace.items() if name in {*uses.made, "model"}}


def names_made(source: str) -> set[str]:
    """The names that a program's own lines bind: what is assigned, imported or defined."""
    with _parsing:
        table = symtable.symtable(source, "snippet", "exec")
    return {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}


def names_from_before(source: str) -> set[str]:
    """The global names that a program reads, in functions too, and does not bind."""
    with _parsing:
        tables = [symtable.symtable(source, "snippet", "exec")]
    read = {each.get_name() for each in tables[0].get_symbols() if each.is_referenced()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return read - names_made(source)


class _Uses(ast.NodeVisitor):
    """read: the names that are read before they are made; made: those that are made."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.made: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.made.add(node.id)
        elif node.id not in self.made:
            self.read.append(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):  # in `x = x[:4]` it is read first
            self.visit(part)


def outcome(names: Mapping[str, Any]) -> dict[str, Array]:
    """What of it can be compared: numbers and arrays by name, parameters and gradients of `model`."""
    by_name = {name: _numbers(value) for name, value in names.items()}
    model = names.get("model")
    if model is not None:
        module = getattr(model, "module", model)
        for name, p in module.named_parameters():
            by_name[f"model {name}"] = _numbers(p)
            by_name[f"gradient {name}"] = _numbers(_grad(p))
    return {name: array for name, array in by_name.items() if array is not None}


def _grad(p: Any) -> Any:
    try:
        return p.grad
    except RuntimeError:  # a sharded optimizer has no whole gradients to show
        return None


def _numbers(value: Any) -> Array | None:
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    if not isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        return None
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array.copy() if array.dtype.kind in "biuf" else None
