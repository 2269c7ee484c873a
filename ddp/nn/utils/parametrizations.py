"""Weight and spectral normalization, as parametrizations and in PyTorch's older form.

The older form is the same parametrization, but its state dict has older paths, such as weight_g and weight_v. The older
spectral norm also computes v before u in each iteration of the power method.

Sources: Salimans & Kingma 2016, arXiv:1602.07868 (weight); Miyato et al. 2018, arXiv:1802.05957 (spectral).
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.nn.convolution import ConvTranspose1d, ConvTranspose2d
from ddp.nn.module import Module
from ddp.nn.normalization import normalize
from ddp.nn.parameter import Buffer
from ddp.nn.utils.parametrize import M, register_parametrization, remove_parametrizations

__all__ = ["spectral_norm", "weight_norm"]


def _as_matrix(weight: Tensor, dim: int) -> Tensor:
    """Reshapes a weight to a matrix with weight.shape[dim] rows."""
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
        if self.dim in (None, -1):
            return v.norm()
        lengths = _as_matrix(v, self.dim).norm(2, 1)
        return lengths.reshape([-1 if i == self.dim % v.ndim else 1 for i in range(v.ndim)])


class _SpectralNorm(Module):
    order = 1  # 1: the power method computes u, then v; -1, the older form: v, then u

    def __init__(self, module: Any, name: str, iterations: int, eps: float, dim: int | None) -> None:
        super().__init__()
        self.iterations = iterations
        self.normalize = partial(normalize, dim=0, eps=eps)
        self.dim = int(isinstance(module, ConvTranspose1d | ConvTranspose2d)) if dim is None else dim
        weight = getattr(module, name)
        matrix = _as_matrix(weight, self.dim)
        self._u, self._v = (Buffer(self.normalize(weight.new_empty(n).normal_())) for n in matrix.shape)
        self.iterate(matrix, 15)

    @no_grad()
    def iterate(self, matrix: Tensor, times: int) -> None:
        """Runs `times` iterations of the power method, in place: u = Wv/|Wv|, v = W'u/|W'u|; see `order`."""
        steps = [(self._u, matrix, self._v), (self._v, matrix.T, self._u)]
        for target, factor, other in steps[:: self.order] * times:
            target.copy_(self.normalize(factor.mv(other)))

    def forward(self, weight: Tensor) -> Tensor:
        matrix = _as_matrix(weight, self.dim)
        if self.training:
            self.iterate(matrix, self.iterations)
        # Copies: backward reads u and v, and the next forward writes them.
        return weight / self._u.clone().dot(matrix.mv(self._v.clone()))


def weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """Trains a parameter as length and direction, w = g * v/|v|, and returns the module.

    parametrizations.NAME.original0 is g, and original1 is v, of the shape of w. dim: every index along it has its own
    length, and g has size 1 in all other dimensions; None or, as in PyTorch, -1: there is one length, and g is 0-d.
    `nn.utils.weight_norm` is the same, but its state dict has the paths NAME_g and NAME_v.

    Raises: ArgumentError if there is no such parameter, RangeError for a dimension that it does not have.
    Source: Salimans & Kingma 2016, arXiv:1602.07868.
    """
    return register_parametrization(module, name, _WeightNorm(dim))


def spectral_norm(
    module: M, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> M:
    """Divides a parameter, read as a matrix, by its largest singular value, and returns the module.

    The power method approximates the value, by `n_power_iterations` iterations whenever the parameter is read in
    training. dim: the dimension of the matrix's rows; None: 1 for transposed convolutions, else 0.
    The state dict has parametrizations.NAME.original, and the method's vectors, parametrizations.NAME.0._u and ._v. The
    state dict after `nn.utils.spectral_norm` has NAME_orig, NAME_u and NAME_v instead.

    Raises: AttributeError if there is no such parameter; ArgumentError if the tensor is not a parameter; RangeError for
    a dimension that it does not have.
    Source: Miyato et al. 2018, arXiv:1802.05957.
    """
    return register_parametrization(module, name, _SpectralNorm(module, name, n_power_iterations, eps, dim))


def _older(function: Any, **parts: str) -> Any:
    """Makes the older form of a normalization, whose state dict has other paths.

    parts: maps the suffix of an older path, NAME_suffix, to the tensor's path below parametrizations.NAME
    """

    @wraps(function)
    def form(module: Any, name: str = "weight", *args: Any, **options: Any) -> Any:
        function(module, name, *args, **options)
        module.parametrizations[name][0].order = -1
        paths = {f"{name}_{suffix}": f"parametrizations.{name}.{part}" for suffix, part in parts.items()}
        module.register_load_state_dict_pre_hook(partial(_rename, paths))
        module.register_state_dict_post_hook(partial(_rename, {new: path for path, new in paths.items()}))
        return module

    return form


def _rename(paths: dict[str, str], module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook that renames entries of a state dict. paths: maps old paths to new ones"""
    for path, new in paths.items():
        if prefix + path in state:
            state[prefix + new] = state.pop(prefix + path)


old_weight_norm = _older(weight_norm, g="original0", v="original1")
old_spectral_norm = _older(spectral_norm, orig="original", u="0._u", v="0._v")


def remove_norm(module: M, name: str = "weight") -> M:
    """Removes a normalization: the weight becomes a parameter again, with its present value. Raises: ArgumentError."""
    return remove_parametrizations(module, name)
