"""State dicts: what a module remembers, by path; loading checks everything before it changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.interop import as_tensor, from_foreign
from ddp.errors import DtypeError, StateDictError
from ddp.nn._parameter import Parameter

if TYPE_CHECKING:
    from ddp.nn._module import Module

EXTRA = "_extra_state"


class Incompatible(NamedTuple):
    """The paths that loading did not find, and those it did not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __repr__(self) -> str:
        if not self.missing_keys and not self.unexpected_keys:
            return "<All keys matched successfully>"
        return f"Incompatible(missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys})"


class _Place(NamedTuple):
    """Where a tensor of the state is: in which dict of parameters or buffers, under which name."""

    part: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.part[self.name]


def _places(module: Module, lead: str) -> Iterator[tuple[str, _Place]]:
    """The parameters and persistent buffers of one module, by path."""
    for name, param in module._parameters.items():
        if param is not None:
            yield lead + name, _Place(module._parameters, name)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._transient:
            yield lead + name, _Place(module._buffers, name)


def _lead(module: Module, lead: str, child: str) -> str:
    """What stands before the names of a child's state. lead: the same of the module."""
    return lead if child == module._nameless_ else f"{lead}{child}."


def _defines(module: Module, name: str) -> bool:
    from ddp.nn._module import Module

    return getattr(type(module), name) is not getattr(Module, name)


def state_dict(module: Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> dict[str, Any]:
    hooks = module._hooks_
    for (hook,) in tuple(hooks.saving) if hooks else ():
        hook(module, prefix, keep_vars)
    for path, place in _places(module, prefix):
        destination[path] = place.tensor if keep_vars else place.tensor.detach()
    if _defines(module, "get_extra_state"):
        destination[prefix + EXTRA] = module.get_extra_state()
    for name, child in module._modules.items():
        if child is not None:
            child.state_dict(destination=destination, prefix=_lead(module, prefix, name), keep_vars=keep_vars)
    for (hook,) in tuple(hooks.saved) if hooks else ():
        hook(module, destination, prefix, {})
    return destination


@no_grad()
def load_state_dict(module: Module, given: Mapping[str, Any], strict: bool, assign: bool) -> Incompatible:
    if not isinstance(given, Mapping):
        raise DtypeError(f"load_state_dict into {type(module).__name__}: expected a dict, got {type(given).__name__}")
    found = Incompatible([], [])
    problems: list[str] = []
    metadata = getattr(given, "_metadata", None) or {}  # that PyTorch keeps beside its state dicts
    writes: list[Callable[[], None]] = []

    def walk(part: Module, given: dict[str, Any], lead: str) -> None:
        about = {**metadata.get(lead[:-1], {}), "assign_to_params_buffers": assign}
        if _defines(part, "_load_from_state_dict"):  # it may look at what it loaded: that cannot wait
            part._load_from_state_dict(given, lead, about, True, *found, problems)
        else:
            writes.extend(planned(part, given, lead, about, True, *found, problems))
        for name, child in part._modules.items():
            if child is not None:
                below = _lead(part, lead, name)
                inside = given if below == lead else {path: x for path, x in given.items() if path.startswith(below)}
                walk(child, inside, below)

    walk(module, dict(given), "")
    hooked = [part for part in module.modules() if part._hooks_ and part._hooks_.loaded]
    # A hook after loading may forgive a missing key, so then the loading comes first.
    _raise(module, problems, found if strict and not hooked else None)
    for write in writes:
        write()
    for part in reversed(hooked):
        for (hook,) in tuple(part._hooks_.loaded) if part._hooks_ else ():
            hook(part, found)
    _raise(module, problems, found if strict else None)
    return found


def planned(
    module: Module,
    given: dict[str, Any],
    lead: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    problems: list[str],
) -> list[Callable[[], None]]:
    """What loads the module's own part of `given`, children apart; what cannot be loaded goes to the three lists.

    lead: what stands before the names; strict: what is missing or unexpected is listed
    """
    for (hook,) in tuple(module._hooks_.loading) if module._hooks_ else ():
        hook(module, given, lead, metadata, strict, missing, unexpected, problems)
    assign = bool(metadata.get("assign_to_params_buffers"))
    places = dict(_places(module, lead))
    problems += _unlike(places, given, assign)
    loaded = [path for path in places if path in given]
    writes: list[Callable[[], None]] = [partial(_write, places[path], given[path], assign) for path in loaded]
    wanted = list(places)
    extra = lead + EXTRA
    if _defines(module, "set_extra_state") and extra in given:
        writes.append(partial(module.set_extra_state, given[extra]))
    if _defines(module, "get_extra_state"):
        wanted.append(extra)
    if strict:
        missing.extend(path for path in wanted if path not in given)
        if module._nameless_ is None:  # else the child knows
            own = {path.removeprefix(lead) for path in places} | set(module._modules)
            if _defines(module, "set_extra_state"):
                own.add(EXTRA)
            for path in given:
                name, dot, _ = path.removeprefix(lead).partition(".")
                if path.startswith(lead) and (name not in own or bool(dot) != (name in module._modules)):
                    unexpected.append(path)
    return writes


def _write(place: _Place, value: Any, assign: bool) -> None:
    if assign:
        place.part[place.name] = _adopted(place.tensor, value)
    else:
        place.tensor.copy_(value)


def _unlike(places: Mapping[str, _Place], given: dict[str, Any], assign: bool) -> Iterator[str]:
    """What does not fit. Tensors of other libraries in `given` become ours."""
    for path, place in places.items():
        if path not in given:
            continue
        try:
            given[path] = from_foreign(given[path])
        except Exception as error:  # of the other library
            yield f"no tensor: {path} is a {type(given[path]).__name__} in the state dict: {error}"
            continue
        value, shape = given[path], place.tensor.shape
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            yield f"no tensor: {path} is a {type(value).__name__} in the state dict"
        elif tuple(value.shape) != tuple(shape):
            yield f"size mismatch: {path} is {tuple(value.shape)} in the state dict, {tuple(shape)} in the module"
        elif assign and place.tensor._end is not None and place.tensor._end.watcher is not None:
            yield f"assign: {path} is wrapped, as under DataParallel; load before wrapping, or without assign"


def _raise(module: Module, problems: list[str], found: Incompatible | None) -> None:
    texts = []
    if found is not None and found.missing_keys:
        texts.append(f"missing: {', '.join(found.missing_keys)}")
    if found is not None and found.unexpected_keys:
        texts.append(f"unexpected: {', '.join(found.unexpected_keys)}")
    texts += problems
    if texts:
        raise StateDictError(f"load_state_dict into {type(module).__name__}: " + "; ".join(texts))


def _adopted(own: Tensor, value: Any) -> Tensor:
    """`value` in the place of `own`: a Parameter for a parameter."""
    value = value if isinstance(value, Tensor) else as_tensor(value)
    if not isinstance(own, Parameter) or isinstance(value, Parameter):
        return value
    return Parameter(value, own.requires_grad)
