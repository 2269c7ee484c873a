"""Weight and spectral normalization, as parametrizations and in PyTorch's older form.

The older form is the same parametrization, whose state dict has the older paths: weight_g and weight_v for one.

Sources: Salimans & Kingma 2016, arXiv:1602.07868 (weight); Miyato et al. 2018, arXiv:1802.05957 (spectral).
"""

from __future__ import annotations

from functools import partial
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
    """(weight.shape[dim], the other elements)"""
    return weight.movedim(dim, 0).flatten(1) if weight.ndim > 1 else weight.unsqueeze(1)


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
        if self.dim is None:
            return v.norm()
        return _as_matrix(v, self.dim).norm(2, 1).reshape([-1 if i == self.dim else 1 for i in range(v.ndim)])


class _SpectralNorm(Module):
    def __init__(self, weight: Tensor, iterations: int, eps: float, dim: int, is_older: bool) -> None:
        super().__init__()
        self.iterations = iterations
        self.eps = eps
        self.dim = dim
        self.is_older = is_older
        matrix = self.matrix(weight)
        self._u, self._v = (Buffer(self.normalize(weight.new_empty(n).normal_())) for n in matrix.shape)
        self.iterate(matrix, 15)

    def matrix(self, weight: Tensor) -> Tensor:
        """W; in the older form, which computes v first, it is transposed, and _u is v."""
        matrix = _as_matrix(weight, self.dim)
        return matrix.T if self.is_older else matrix

    def normalize(self, vector: Tensor) -> Tensor:
        return normalize(vector, dim=0, eps=self.eps)

    @no_grad()
    def iterate(self, matrix: Tensor, times: int) -> None:
        """The power method, in place: u = Wv/|Wv|, then v = W'u/|W'u|."""
        for _ in range(times):
            self._u.copy_(self.normalize(matrix.mv(self._v)))
            self._v.copy_(self.normalize(matrix.T.mv(self._u)))

    def forward(self, weight: Tensor) -> Tensor:
        matrix = self.matrix(weight)
        if self.training:
            self.iterate(matrix, self.iterations)
        # Copies: backward reads u and v, and the next forward writes them.
        return weight / self._u.clone().dot(matrix.mv(self._v.clone()))

    def right_inverse(self, value: Tensor) -> Tensor:
        return value


def weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """Trains a parameter as length and direction, w = g * v/|v|, and returns the module.

    parametrizations.NAME.original0 is g, of size 1 in all dimensions but `dim`, and original1 is v, like w. dim: where
    each index has a length of its own; None: one for all, (). State dicts of the older form load, too.

    Raises: ArgumentError if there is no such parameter, RangeError for a dimension that it does not have.
    Source: Salimans & Kingma 2016, arXiv:1602.07868.
    """
    register_parametrization(module, name, _WeightNorm(dim))
    return _with_older_paths(module, name, False, g="original0", v="original1")


def old_weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """`parametrizations.weight_norm` whose state dict has the older form's paths, NAME_g and NAME_v."""
    register_parametrization(module, name, _WeightNorm(dim))
    return _with_older_paths(module, name, True, g="original0", v="original1")


def spectral_norm(
    module: M, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> M:
    """Divides a parameter, read as a matrix, by its largest singular value, and returns the module.

    The value is that of the power method, which goes on by `n_power_iterations` whenever the parameter is read in
    training. dim: the matrix's rows; None: the outputs, which are 1 of transposed convolutions and 0 otherwise. The
    state dict has parametrizations.NAME.original, and the method's vectors, parametrizations.NAME.0._u and ._v.

    Raises: AttributeError if there is no such parameter, RangeError for a dimension that it does not have.
    Source: Miyato et al. 2018, arXiv:1802.05957.
    """
    return _spectral_norm(module, name, n_power_iterations, eps, dim, False)


def old_spectral_norm(
    module: M, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> M:
    """`parametrizations.spectral_norm` whose state dict has the older form's paths, NAME_orig, NAME_u and NAME_v."""
    _spectral_norm(module, name, n_power_iterations, eps, dim, True)
    return _with_older_paths(module, name, True, orig="original", u="0._v", v="0._u")


def _spectral_norm(module: M, name: str, iterations: int, eps: float, dim: int | None, is_older: bool) -> M:
    if dim is None:
        dim = int(isinstance(module, ConvTranspose1d | ConvTranspose2d))
    norm = _SpectralNorm(getattr(module, name), iterations, eps, dim, is_older)
    return register_parametrization(module, name, norm)


def _with_older_paths(module: M, name: str, is_older: bool, **parts: str) -> M:
    """Has the module load state dicts of the older form, and write them if it `is_older`.

    parts: the older form's suffixes of the name, and what these are here
    """
    paths = [(f"{name}_{suffix}", f"parametrizations.{name}.{part}") for suffix, part in parts.items()]
    module.register_load_state_dict_pre_hook(partial(_rename, paths))
    if is_older:
        module.register_state_dict_post_hook(partial(_rename, [pair[::-1] for pair in paths]))
    return module


def _rename(paths: list[tuple[str, str]], module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook of state dicts: what is at the first path of each pair goes to the second."""
    for path, new in paths:
        if prefix + path in state:
            state[prefix + new] = state.pop(prefix + path)


def remove_norm(module: M, name: str = "weight") -> M:
    """Makes a weight that is normalized in the older form a parameter again, with its value. Raises: ArgumentError."""
    return remove_parametrizations(module, name)
