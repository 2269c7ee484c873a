"""The formula of an update, written once: a program for the CPU and a CUDA kernel are both compiled from it.

A formula is a few lines of arithmetic. SGD with momentum:

    momentum_buffer = momentum_buffer * momentum + d
    p = p - momentum_buffer * lr

`p`, `grad`, the states and every name that a line assigns are arrays. `step` is the count of updates including this
one, `mu_product` the product of a factor over these updates. Every other name is a setting of the parameter group.
Parts without arrays (`1 - beta1`) are scalars: they are computed in double precision once a step, then rounded to the
dtype of the arrays (float32 for 16 bits). Every operation on arrays is rounded by itself, in the order of the formula.
So with the same scalars the result has the same bits on the CPU and on a GPU, in any memory layout. Only scalars with
`pow` may differ in the last bits, because a GPU computes it in another way.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ddp.ops.update import Pass, Program

# The binary operators of arrays. Key: the class in `ast`. Value: the name of the function in a `Pass`.
_OPERATORS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
# The functions of arrays that a formula may call.
_ON_ARRAYS = ("sqrt", "sign", "maximum")


def rectification(step: float, beta2: float) -> float:
    """RAdam's factor r of this step; 0 while the variance of its adaptive rate is not tractable (rho of at most 5).

    Source: Liu et al. 2020, arXiv:1908.03265, Algorithm 2. The limit of 5 is PyTorch's; the paper has 4.
    """
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        return 0.0
    return math.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))


# The functions of scalars that a formula may call. On a GPU, `rectification` is the function in
# ddp._cuda.optimizer_kernels.
_ON_SCALARS = {"sqrt": math.sqrt, "pow": pow, "rectification": rectification}


class Formula:
    """A compiled formula.

    program: the passes for the CPU, over rows of p, grad and the states
    factor: the expression that multiplies `mu_product` in a step, before the scalars are computed
    scalars: expressions of `settings`, `step` and `mu_product`; like `factor`, they are valid in Python and in C
    settings: the names of the settings that `scalars` and `factor` read
    counts: whether `scalars` or `factor` read `step`
    evaluate: a function of (step, *settings, mu_product) that computes the scalars in double precision
    evaluate_factor: a function of (step, *settings) that computes the factor in double precision
    device_lines: the formula in C, where n[i] is the i-th scalar
    """

    def __init__(self, lines: tuple[str, ...], states: tuple[str, ...], factor: str) -> None:
        self.states = states
        self.factor = factor
        self._passes: list[tuple[str, tuple[str | int, ...], str]] = []
        self._scratch: list[str] = []
        self.scalars: list[str] = []
        self.device_lines: list[str] = []
        updated = ("p", *states)
        # Key: a name in the formula. Value: the array that holds its value.
        self._registers = {name: name for name in ("grad", *updated)}
        self._free: list[str] = []  # scratch arrays whose value is no longer needed
        assignments: list[Any] = [ast.parse(line).body[0] for line in lines]
        arrays = {*self._registers, *(line.partition(" = ")[0] for line in lines)}
        self._reads = Counter(name for assignment in assignments for name in _names(assignment.value))
        for line, assignment in zip(lines, assignments, strict=True):
            target = line.partition(" = ")[0]
            expression = self._hoist(assignment.value, arrays)
            out = target if target in updated else None
            self.device_lines.append(f"{'A ' if out is None else ''}{target} = {ast.unparse(expression)};")
            # If the expression reads its target once, the operation that reads the target may overwrite it.
            reusable = out if Counter(_names(expression))[target] == 1 else None
            self._registers[target] = self._emit(expression, out, reusable)
        order = ["p", "grad", *states, *self._scratch]
        passes = []
        for function, inputs, out in self._passes:
            operands = tuple(-1 - x if isinstance(x, int) else order.index(x) for x in inputs)
            passes.append(Pass(function, operands, order.index(out)))
        self.program = Program(tuple(passes), len(order))
        names = {name for expression in (*self.scalars, factor) for name in _names(ast.parse(expression))}
        self.counts = "step" in names
        self.settings = tuple(sorted(names - {"step", "mu_product"} - set(_ON_SCALARS)))
        arguments = ", ".join(("step", *self.settings))
        results = "".join(f"{scalar}, " for scalar in self.scalars)
        self.evaluate: Callable[..., tuple[float, ...]] = eval(
            f"lambda {arguments}, mu_product: ({results})", dict(_ON_SCALARS)
        )
        self.evaluate_factor: Callable[..., float] = eval(f"lambda {arguments}: {factor}", dict(_ON_SCALARS))

    def _hoist(self, node: ast.expr, arrays: set[str]) -> ast.expr:
        """Adds the largest subexpressions without arrays to `scalars`, and replaces them by n[i]."""
        if not arrays & set(_names(node)):
            text = ast.unparse(node)
            if text not in self.scalars:
                self.scalars.append(text)
            return ast.Subscript(ast.Name("n"), ast.Constant(self.scalars.index(text)))
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [self._hoist(item, arrays) for item in value]
            elif isinstance(value, ast.expr) and name != "func":
                setattr(node, name, self._hoist(value, arrays))
        return node

    def _emit(self, node: Any, out: Any = None, reusable: str | None = None) -> Any:
        """Appends the passes of an expression. Returns: the array with its value, or the number of a scalar.

        out: the array for the value; None: any array. reusable: an array; the pass that reads it may overwrite it
        """
        if isinstance(node, ast.Subscript):
            number: Any = node.slice
            return number.value
        if isinstance(node, ast.Name):
            self._reads[node.id] -= 1
            return self._registers[node.id]
        if isinstance(node, ast.BinOp):
            function = _OPERATORS[type(node.op)]
            operands = [node.left, node.right]
        elif isinstance(node, ast.UnaryOp):
            function = "negative"
            operands = [node.operand]
        else:
            function = node.func.id
            operands = node.args
            assert function in _ON_ARRAYS, function
        inputs = tuple(self._emit(operand, reusable=reusable) for operand in operands)
        in_use = {register for name, register in self._registers.items() if self._reads[name] > 0}
        self._free += [array for array in dict.fromkeys(inputs) if array in self._scratch and array not in in_use]
        if out is None and reusable in inputs:
            out = reusable
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
    """Compiles the lines of a formula. states: names of the states that the lines use; factor: see `Formula`"""
    return Formula(lines, states, factor)
