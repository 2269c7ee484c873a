"""The formula of an update, written once: a program for the CPU and a CUDA kernel are both compiled from it.

A formula is a few lines of arithmetic. SGD with momentum:

    momentum_buffer = momentum_buffer * momentum + d
    p = p - momentum_buffer * lr

`p`, `grad`, the states and whatever a line assigns are arrays. Every other name is a setting of the parameter group, or
`step`, the count of updates with this one, or `mu_product`, the product of a factor over these updates. Parts made of
settings alone (`1 - beta1`) are scalars: computed in double precision once a step, then rounded to the dtype of the
arrays. Every operation on arrays is rounded by itself, in the
order of the formula: so the numbers are the same, bit for bit, however gradients lie and on both devices.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ddp.ops.update import Pass, Program

_OPERATORS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
_ON_ARRAYS = ("sqrt", "sign", "maximum")


def rectification(step: float, beta2: float) -> float:
    """RAdam's r of this step, 0 while the variance of its adaptive rate is not tractable (rho of at most 5).

    Source: Liu et al. 2020, arXiv:1908.03265, Algorithm 2.
    """
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        return 0.0
    return math.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))


_ON_SCALARS = {"sqrt": math.sqrt, "pow": pow, "rectification": rectification}  # in C: ddp._cuda.optimizer_kernels


class Formula:
    """A compiled formula.

    program: the passes for the CPU, over rows of p, grad and the states
    factor: what `mu_product` is multiplied by in a step, before the scalars are computed; evaluate_factor: its value
    scalars: expressions of `settings`, `step` and `mu_product`; counts: whether one of them reads `step`
    evaluate: the scalars of (step, *settings, mu_product), in double precision
    Scalars and factor are valid in Python and in C.
    device_lines: the formula in C, where n[i] is a scalar
    """

    def __init__(self, lines: tuple[str, ...], states: tuple[str, ...], factor: str) -> None:
        self.states, self.factor = states, factor
        self._passes: list[tuple[str, tuple[str | int, ...], str]] = []
        self._scratch: list[str] = []
        self.scalars: list[str] = []
        self.device_lines: list[str] = []
        written = ("p", *states)
        self._registers = {name: name for name in ("grad", *written)}
        self._free: list[str] = []
        assigned: list[Any] = [ast.parse(line).body[0] for line in lines]
        arrays = {*self._registers, *(line.partition(" = ")[0] for line in lines)}
        self._reads = Counter(name for each in assigned for name in _names(each.value))
        for line, tree in zip(lines, assigned, strict=True):
            target, expression = line.partition(" = ")[0], self._hoist(tree.value, arrays)
            out = target if target in written else None
            self.device_lines.append(f"{'A ' if out is None else ''}{target} = {ast.unparse(expression)};")
            # Within the expression, its target may be overwritten once nothing else there reads it.
            early = out if Counter(_names(expression))[target] == 1 else None
            self._registers[target] = self._emit(expression, out, early)
        order = ["p", "grad", *states, *self._scratch]
        self.program = Program(
            tuple(
                Pass(
                    function, tuple(-1 - x if isinstance(x, int) else order.index(x) for x in inputs), order.index(out)
                )
                for function, inputs, out in self._passes
            ),
            len(order),
        )
        names = {name for each in (*self.scalars, factor) for name in _names(ast.parse(each))}
        self.counts = "step" in names
        self.settings = tuple(sorted(names - {"step", "mu_product"} - set(_ON_SCALARS)))
        arguments, results = ", ".join(("step", *self.settings)), "".join(f"{each}, " for each in self.scalars)
        self.evaluate: Callable[..., tuple[float, ...]] = eval(
            f"lambda {arguments}, mu_product: ({results})", dict(_ON_SCALARS)
        )
        self.evaluate_factor: Callable[..., float] = eval(f"lambda {arguments}: {factor}", dict(_ON_SCALARS))

    def _hoist(self, node: ast.expr, arrays: set[str]) -> ast.expr:
        """Replaces the largest parts without arrays by n[i]."""
        if not arrays & set(_names(node)):
            text = ast.unparse(node)
            if text not in self.scalars:
                self.scalars.append(text)
            return ast.Subscript(ast.Name("n"), ast.Constant(self.scalars.index(text)))
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [self._hoist(each, arrays) for each in value]
            elif isinstance(value, ast.expr) and name != "func":
                setattr(node, name, self._hoist(value, arrays))
        return node

    def _emit(self, node: Any, out: Any = None, early: str | None = None) -> Any:
        """Appends the passes of an expression; where its value is. out: where it belongs, or a scratch array."""
        if isinstance(node, ast.Subscript):
            position: Any = node.slice
            return position.value
        if isinstance(node, ast.Name):
            self._reads[node.id] -= 1
            return self._registers[node.id]
        if isinstance(node, ast.BinOp):
            function, operands = _OPERATORS[type(node.op)], [node.left, node.right]
        elif isinstance(node, ast.UnaryOp):
            function, operands = "negative", [node.operand]
        else:
            function, operands = node.func.id, node.args
            assert function in _ON_ARRAYS, function
        inputs = tuple(self._emit(each, early=early) for each in operands)
        held = {register for name, register in self._registers.items() if self._reads[name] > 0}
        self._free += [each for each in dict.fromkeys(inputs) if each in self._scratch and each not in held]
        if out is None and early in inputs:
            out = early
        elif out is None and self._free:
            out = self._free.pop()
        elif out is None:
            out = f"scratch{len(self._scratch)}"
            self._scratch.append(out)
        self._passes.append((function, inputs, out))
        return out


def _names(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


@functools.lru_cache(256)
def compile_formula(lines: tuple[str, ...], states: tuple[str, ...], factor: str = "1") -> Formula:
    """The formula of these lines. states: names of the state arrays that they read and write; factor: see `Formula`"""
    return Formula(lines, states, factor)
