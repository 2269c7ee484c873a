"""State dicts: what a module remembers, by path; loading checks everything before it copies anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError

if TYPE_CHECKING:
    from ddp.nn._module import Module


class Incompatible(NamedTuple):
    """The paths that loading did not find, and those it did not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def _entries(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Every place of a parameter or persistent buffer: a tied one under each of its paths."""
    for path, part in module.named_modules(remove_duplicate=False):
        lead = f"{path}." if path else ""
        for name, param in part._parameters.items():
            if param is not None:
                yield lead + name, param
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._transient:
                yield lead + name, buffer


def state_dict(module: Module) -> dict[str, Tensor]:
    return {path: tensor.detach() for path, tensor in _entries(module)}


@no_grad()
def load_state_dict(module: Module, given: Mapping[str, Tensor], strict: bool) -> Incompatible:
    own = dict(_entries(module))
    missing = [path for path in own if path not in given]
    unexpected = [path for path in given if path not in own]
    problems = []
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    problems += [
        f"size mismatch: {path} is {given[path].shape} in the state dict, {tensor.shape} in the module"
        for path, tensor in own.items()
        if path in given and given[path].shape != tensor.shape
    ]
    if problems:
        raise StateDictError(f"load_state_dict into {type(module).__name__}: " + "; ".join(problems))
    for path, tensor in own.items():
        if path in given:
            tensor.copy_(given[path])
    return Incompatible(missing, unexpected)
