"""One step of a recurrent layer, for loops of one's own."""

from __future__ import annotations

from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty, zeros
from ddp.errors import ArgumentError, ShapeError
from ddp.nn._module import Module, Parameter
from ddp.nn._recurrent import GATES, reset_uniform, run_layer


class RNNCellBase(Module):
    """What the cells share. weight_ih: (G*H, input_size), weight_hh: (G*H, H), bias_ih, bias_hh: (G*H,)."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, num_chunks: int, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        wide = num_chunks * hidden_size
        self.weight_ih = Parameter(empty((wide, input_size), device=device, dtype=dtype))
        self.weight_hh = Parameter(empty((wide, hidden_size), device=device, dtype=dtype))
        for name in ("bias_ih", "bias_hh"):
            self.register_parameter(name, Parameter(empty((wide,), device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights and biases uniformly within 1/sqrt(hidden_size)."""
        reset_uniform(self, self.hidden_size)

    def _step(self, mode: str, input: Tensor, states: list[Tensor | None]) -> list[Tensor]:
        """The next states, (N, H) or (H,). Raises: ShapeError."""
        name = type(self).__name__
        if input.ndim not in (1, 2) or input.shape[-1] != self.input_size:
            wanted = f"(N, {self.input_size}) or ({self.input_size},)"
            raise ShapeError(f"{name}: input {tuple(input.shape)}: expected {wanted}")
        shape = (*input.shape[:-1], self.hidden_size)
        rows = input.unsqueeze(0) if input.ndim == 2 else input.reshape((1, 1, self.input_size))
        given = []
        for state in states:
            if state is None:
                state = zeros(shape, dtype=input.dtype, device=input.device)
            elif tuple(state.shape) != shape:
                raise ShapeError(f"{name}: state {tuple(state.shape)} for input {tuple(input.shape)}: expected {shape}")
            given.append(state if input.ndim == 2 else state.unsqueeze(0))
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, None]
        _, *found = run_layer(mode, rows, tuple(given), weights)
        return found if input.ndim == 2 else [x.squeeze(0) for x in found]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else f", bias={self.bias}")


class RNNCell(RNNCellBase):
    """act(weight_ih @ input + bias_ih + weight_hh @ hx + bias_hh), act by nonlinearity: "tanh" or "relu"."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(f"RNNCell: nonlinearity {nonlinearity!r}: expected 'tanh' or 'relu'")
        super().__init__(input_size, hidden_size, bias, 1, device, dtype)
        self.nonlinearity = nonlinearity

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """input: (N, input_size) or (input_size,); hx: (N, H) or (H,), zeros if None; returns the next hx."""
        return self._step(f"RNN_{self.nonlinearity.upper()}", input, [hx])[0]

    def extra_repr(self) -> str:
        usual = self.nonlinearity == "tanh"
        return super().extra_repr() + ("" if usual else f", nonlinearity={self.nonlinearity}")


class LSTMCell(RNNCellBase):
    """One step of an LSTM, gates in the order i, f, g, o."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, GATES["LSTM"], device, dtype)

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """input: (N, input_size) or (input_size,); hx: state and cell state, zeros if None; returns the next two."""
        h, c = self._step("LSTM", input, [None, None] if hx is None else list(hx))
        return h, c


class GRUCell(RNNCellBase):
    """One step of a GRU, gates in the order r, z, n."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, GATES["GRU"], device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """input: (N, input_size) or (input_size,); hx: (N, H) or (H,), zeros if None; returns the next hx."""
        return self._step("GRU", input, [hx])[0]
