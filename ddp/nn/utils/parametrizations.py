"""Weight and spectral normalization, as parametrizations and in PyTorch's older form.

The older form keeps the parts beside other parameters, as weight_g and weight_v, and registers no module.

Sources: Salimans & Kingma 2016, arXiv:1602.07868 (weight); Miyato et al. 2018, arXiv:1802.05957 (spectral).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.nn.convolution import ConvTranspose1d, ConvTranspose2d
from ddp.nn.module import Module
from ddp.nn.normalization import normalize
from ddp.nn.parameter import Buffer, Parameter
from ddp.nn.utils.parametrize import M, ParametrizationList, compute_by, register_parametrization, tensor_of

__all__ = ["spectral_norm", "weight_norm"]


def _as_matrix(weight: Tensor, dim: int) -> Tensor:
    """(weight.shape[dim], the other elements)"""
    return weight.movedim(dim, 0).reshape(weight.shape[dim], -1)


class _WeightNorm(Module):
    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, weight_g: Tensor, weight_v: Tensor) -> Tensor:
        # w = v * g/|v|
        return weight_v * (weight_g / self.norm(weight_v))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(weight), weight

    def norm(self, v: Tensor) -> Tensor:
        if self.dim is None or self.dim == -1:
            return v.norm()
        return _as_matrix(v, self.dim).norm(2, 1).reshape([-1 if i == self.dim else 1 for i in range(v.ndim)])


class _SpectralNorm(Module):
    def __init__(self, module: Module, weight: Tensor, iterations: int, eps: float, dim: int | None) -> None:
        super().__init__()
        transposed = isinstance(module, ConvTranspose1d | ConvTranspose2d)
        self.dim = int(transposed) if dim is None else dim
        self.eps = eps
        self.iterations = iterations
        for name, size in zip(("_u", "_v"), _as_matrix(weight, self.dim).shape, strict=True):
            self.register_buffer(name, normalize(weight.new_empty(size).normal_(), dim=0, eps=eps))
        self.iterate(_as_matrix(weight, self.dim), self._u, self._v, 15)

    @no_grad()
    def iterate(self, matrix: Tensor, u: Tensor, v: Tensor, times: int) -> None:
        """The power method, in place: u = Wv/|Wv|, then v = W'u/|W'u|."""
        for _ in range(times):
            u.copy_(normalize(matrix.mv(v), dim=0, eps=self.eps))
            v.copy_(normalize(matrix.T.mv(u), dim=0, eps=self.eps))

    def forward(self, weight: Tensor, *vectors: Tensor) -> Tensor:
        """vectors: those of the older form, in which v comes first."""
        matrix = _as_matrix(weight, self.dim)
        u, v = vectors or (self._u, self._v)
        if self.training:
            order = (matrix.T, v, u) if vectors else (matrix, u, v)
            self.iterate(*order, self.iterations)
        # Copies: backward reads u and v, and the next forward writes them.
        return weight / u.clone().dot(matrix.mv(v.clone()))

    def right_inverse(self, value: Tensor) -> Tensor:
        return value


def weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """Trains a parameter as length and direction, w = g * v/|v|, and returns the module.

    parametrizations.NAME.original0 is g, of size 1 in all dimensions but `dim`, and original1 is v, like w. dim: where
    each index has a length of its own; None and -1: one for all, (). State dicts of the older form load, too.

    Raises: ArgumentError if there is no such parameter, RangeError for a dimension that it does not have.
    Source: Salimans & Kingma 2016, arXiv:1602.07868.
    """
    register_parametrization(module, name, _WeightNorm(dim), unsafe=True)
    module.register_load_state_dict_pre_hook(partial(_rename_old_keys, name))
    return module


def _rename_old_keys(name: str, module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: the paths of the older form become those of the parametrization."""
    for i, part in enumerate("gv"):
        old = f"{prefix}{name}_{part}"
        if old in state:
            state[f"{prefix}parametrizations.{name}.original{i}"] = state.pop(old)


def spectral_norm(
    module: M, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> M:
    """Divides a parameter, read as a matrix, by its largest singular value, and returns the module.

    The value is that of the power method, which goes on by `n_power_iterations` whenever the parameter is read in
    training. dim: the matrix's rows; None: the outputs, which are 1 of transposed convolutions and 0 otherwise. The
    state dict has parametrizations.NAME.original, and the method's vectors, parametrizations.NAME.0._u and ._v.

    Raises: ArgumentError if there is no such parameter, RangeError for a dimension that it does not have.
    Source: Miyato et al. 2018, arXiv:1802.05957.
    """
    norm = _SpectralNorm(module, tensor_of(module, name), n_power_iterations, eps, dim)
    return register_parametrization(module, name, norm)


def _old_form(module: Module, name: str, norm: Module, parts: dict[str, Any]) -> None:
    """Has `norm` compute the tensor of that name from these parameters and buffers, which become the module's own."""
    held = ParametrizationList([norm])
    held.names = list(parts)
    compute_by(module, name, held)
    for part_name, part in parts.items():
        setattr(module, part_name, part)


def old_weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """Trains a parameter as length and direction, w = g * v/|v|: the older form of `parametrizations.weight_norm`.

    The state dict has NAME_g, of size 1 in all dimensions but `dim`, and NAME_v, like w. dim: as there.

    Raises: ArgumentError if there is no such parameter, or it is parametrized; RangeError for a dimension that it does
    not have.
    """
    norm = _WeightNorm(dim)
    g, v = norm.right_inverse(tensor_of(module, name).detach())
    _old_form(module, name, norm, {f"{name}_g": Parameter(g), f"{name}_v": Parameter(v)})
    return module


def remove_weight_norm(module: M, name: str = "weight") -> M:
    """Makes what `nn.utils.weight_norm` computes a parameter again, with its value. Raises: ArgumentError."""
    if f"{name}_g" not in module._parameters:
        raise ArgumentError(f"{type(module).__name__}: {name!r} has no weight_norm of this form")
    weight = Parameter(getattr(module, name))
    for part in module._parametrized_.pop(name).names:
        delattr(module, part)
    setattr(module, name, weight)
    return module


def old_spectral_norm(
    module: M, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> M:
    """Divides a parameter by its largest singular value: the older form of `parametrizations.spectral_norm`.

    The state dict has NAME_orig, and the vectors of the power method, NAME_u and NAME_v. The arguments are as there.

    Raises: ArgumentError if there is no such parameter, or it is parametrized; RangeError for a dimension that it does
    not have.
    """
    weight = tensor_of(module, name)
    norm = _SpectralNorm(module, weight, n_power_iterations, eps, dim)
    parts = {f"{name}_orig": weight, f"{name}_u": Buffer(norm._u), f"{name}_v": Buffer(norm._v)}
    _old_form(module, name, norm, parts)
    return module
