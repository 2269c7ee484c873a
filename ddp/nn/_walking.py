"""The tree of modules: its parts by path, walked in the order in which they were assigned, parents first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ddp._tensor.core import Tensor
from ddp.nn._parameter import Parameter

if TYPE_CHECKING:
    from ddp.nn._module import Module

T = TypeVar("T", bound="Tree")

_registrations = 0


def registered() -> None:
    """Some module has got a part."""
    global _registrations
    _registrations += 1


def registrations() -> int:
    """How often any module has got a part: while this stays, nobody needs to walk a tree to look for new ones."""
    return _registrations


class Tree:
    """What a module holds, and the walks over it."""

    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _transient: set[str]

    @staticmethod
    def _registrations() -> int:
        return _registrations

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The direct children with their names, each once."""
        seen: set[int] = set()
        for name, module in self._modules.items():
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def children(self) -> Iterator[Module]:
        """The direct children, each once."""
        return (module for _, module in self.named_children())

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """This module and all below it with their paths, parents first; each once, unless asked otherwise.

        memo: modules that are left out, along with what is below them; those that were yielded are added.
        """
        seen = set() if memo is None else memo
        if remove_duplicate:
            if self in seen:
                return
            seen.add(self)
        yield prefix, cast("Module", self)
        for name, module in self._modules.items():
            if module is not None:
                path = f"{prefix}.{name}" if prefix else name
                yield from module.named_modules(seen, path, remove_duplicate)

    def modules(self) -> Iterator[Module]:
        """This module and all below it, parents first, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """The parameters with their paths; a tied one once, under its first path, unless asked otherwise."""
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The parameters, tied ones once."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers with their paths, each once unless asked otherwise."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The buffers, each once."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        itself = cast("Module", self)
        modules = self.named_modules(None, prefix, remove_duplicate) if recurse else iter([(prefix, itself)])
        for path, module in modules:
            for name, value in getattr(module, kind).items():
                if value is None or (remove_duplicate and id(value) in seen):
                    continue
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value

    def get_submodule(self, target: str) -> Module:
        """The module at that path, such as "encoder.0"; this one for "". Raises: AttributeError if there is none."""
        found = cast("Module", self)
        for name in target.split(".") if target else ():
            below = found._modules.get(name)
            if below is None:
                raise AttributeError(f"{type(self).__name__} has no module {target!r}: {name!r} is not there")
            found = below
        return found

    def get_parameter(self, target: str) -> Parameter:
        """The parameter at that path. Raises: AttributeError if there is none."""
        return self._get("_parameters", "parameter", target)

    def get_buffer(self, target: str) -> Tensor:
        """The buffer at that path. Raises: AttributeError if there is none."""
        return self._get("_buffers", "buffer", target)

    def _get(self, kind: str, word: str, target: str) -> Any:
        path, _, name = target.rpartition(".")
        found = getattr(self.get_submodule(path), kind).get(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no {word} {target!r}")
        return found

    def apply(self: T, fn: Callable[[Module], Any]) -> T:
        """Calls `fn` on every module below this one, children first, and on this one last."""
        for module in self.children():
            module.apply(fn)
        fn(cast("Module", self))
        return self
