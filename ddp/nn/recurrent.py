"""Recurrent layers over sequences (RNN, LSTM, GRU), and cells that compute one step."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

from ddp._engine import modes
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp._tensor.functions import cat, stack
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn import init
from ddp.nn.dropout import dropout
from ddp.nn.module import Layer
from ddp.nn.parameter import Parameter
from ddp.ops import recurrent

GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "LSTM": 4, "GRU": 3}


def _run_layer(mode: str, x: Tensor, state: tuple[Tensor, ...], weights: list[Any], reverse: bool = False) -> Any:
    """Runs one direction of one layer. x: (T, N, I)

    Returns: the output, (T, N, H), the last state and, for an LSTM, the last cell state.

    Raises: DtypeError if the dtypes of the tensors differ while autocast is off; DeviceError if the tensors are on
    different devices.
    """
    if modes.state.autocast is None:
        dtype = x.array.dtype
        for array in (*state, *weights):
            if array is not None and array.array.dtype != dtype:
                raise DtypeError(f"{mode}: input of {dtype}, state or weights of {array.array.dtype}: expected one")
    if mode == "LSTM":
        return apply(recurrent.lstm, (x, *state, *weights), reverse=reverse)
    if mode == "GRU":
        return apply(recurrent.gru, (x, *state, *weights[:4]), reverse=reverse)
    return apply(recurrent.rnn, (x, *state, *weights[:4]), relu=mode == "RNN_RELU", reverse=reverse)


class _RNNBase(Layer, shown="input_size hidden_size"):
    """The base of RNN, LSTM and GRU: runs layer after layer, in one direction or both.

    Parameters of layer k: weight_ih_lk (G*H, in), weight_hh_lk (G*H, out), bias_ih_lk and bias_hh_lk (G*H,), with
    proj_size also weight_hr_lk (proj_size, H). G: number of gates; H: hidden_size; in: size of the layer's input; out:
    size of its output in one direction. The names for the other direction end in `_reverse`.
    """

    _flags = ("batch_first", "dropout", "bidirectional")
    _usual: ClassVar = {"proj_size": 0, "num_layers": 1, "bias": True, **dict.fromkeys(_flags, 0)}

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if hidden_size <= 0 or num_layers <= 0:
            raise ArgumentError(f"{name}: hidden_size {hidden_size} and num_layers {num_layers} must be positive")
        if isinstance(dropout, bool) or not 0 <= dropout <= 1:
            raise ArgumentError(f"{name}: dropout is a probability, not {dropout}")
        if not 0 <= proj_size < hidden_size or (proj_size and mode != "LSTM"):
            raise ArgumentError(f"{name}: proj_size {proj_size}: only an LSTM has one, smaller than {hidden_size}")
        if dropout > 0 and num_layers == 1:
            warnings.warn(f"{name}: dropout={dropout} acts between layers, and there is one", stacklevel=3)
        self.mode = mode
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        gate_size = GATES[mode] * hidden_size
        out = proj_size or hidden_size
        self._all_names: list[list[str]] = []
        for layer in range(num_layers):
            in_features = input_size if layer == 0 else out * self._directions
            for direction in range(self._directions):
                end = f"_l{layer}" + ("_reverse" if direction else "")
                shapes: dict[str, tuple[int, ...]] = {
                    f"weight_ih{end}": (gate_size, in_features),
                    f"weight_hh{end}": (gate_size, out),
                }
                if bias:
                    shapes |= {f"bias_ih{end}": (gate_size,), f"bias_hh{end}": (gate_size,)}
                if proj_size:
                    shapes[f"weight_hr{end}"] = (proj_size, hidden_size)
                self._register_empty(device, dtype, **shapes)
                self._all_names.append(list(shapes))
        self.reset_parameters()

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def all_weights(self) -> list[list[Parameter]]:
        """The parameters, a list for each layer and direction."""
        return [[getattr(self, name) for name in names] for names in self._all_names]

    def flatten_parameters(self) -> None:
        """Does nothing: there is no packed copy of the weights here."""

    def reset_parameters(self) -> None:
        """Draws all weights and biases uniformly from [-b, b], b = 1/sqrt(hidden_size)."""
        _reset_uniform(self, self.hidden_size)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """input: (T, N, input_size), N first if batch_first, or (T, input_size); hx: the first state, zeros if None.

        Returns (output, last state). output: (T, N, directions*H), with N where the input has it; last state:
        (layers*directions, N, H), for an LSTM a pair of states and cell states. H is hidden_size. If proj_size is
        given, H is proj_size in the output and the states of an LSTM, and hidden_size in its cell states.

        Raises: ShapeError, DtypeError; DeviceError if input, states and parameters are on different devices.
        """
        name = type(self).__name__
        batched = input.ndim == 3
        if input.ndim not in (2, 3) or input.shape[-1] != self.input_size:
            order = "(N, T, {0})" if self.batch_first else "(T, N, {0})"
            raise ShapeError(
                f"{name}: input {tuple(input.shape)}: expected {order.format(self.input_size)} or "
                f"(T, {self.input_size})"
            )
        x = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            x = x.transpose(0, 1)
        if not x.shape[0]:
            raise ShapeError(f"{name}: input {tuple(input.shape)} has no time step")
        initial = self._initial_states(x, hx, batched)
        lasts: list[tuple[Tensor, ...]] = []
        weights = self.all_weights
        for layer in range(self.num_layers):
            outs = []
            for direction in range(self._directions):
                index = layer * self._directions + direction
                state = tuple(value[index] for value in initial)
                out, *last = _run_layer(self.mode, x, state, self._op_weights(weights[index]), direction == 1)
                outs.append(out)
                lasts.append(tuple(last))
            x = outs[0] if len(outs) == 1 else cat(outs, dim=2)
            if self.dropout and layer < self.num_layers - 1:
                x = dropout(x, self.dropout, self.training)
        final = [stack(value) for value in zip(*lasts, strict=True)]
        if not batched:
            x = x.squeeze(1)
            final = [value.squeeze(1) for value in final]
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, (tuple(final) if self.mode == "LSTM" else final[0])

    def _op_weights(self, weights: list[Parameter]) -> list[Any]:
        """The weights in the order of the ops' inputs: w_ih, w_hh, b_ih, b_hh, w_hr. Missing ones are None."""
        w_hr = weights[-1] if self.proj_size else None
        return [*weights[:2], *(weights[2:4] if self.bias else (None, None)), w_hr]

    def _initial_states(self, x: Tensor, hx: Any, batched: bool) -> list[Tensor]:
        """The first states, (layers*directions, N, H). Raises: ShapeError, DtypeError."""
        name = type(self).__name__
        count = self.num_layers * self._directions
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][: 2 if self.mode == "LSTM" else 1]
        if hx is None:
            return [zeros((count, x.shape[1], n), dtype=x.dtype, device=x.device) for n in sizes]
        states = list(hx) if isinstance(hx, tuple | list) else [hx]
        if len(states) != len(sizes):
            raise ShapeError(f"{name}: {len(states)} initial states; expected {len(sizes)}")
        for i, (state, n) in enumerate(zip(states, sizes, strict=True)):
            expected = (count, x.shape[1], n) if batched else (count, n)
            if tuple(state.shape) != expected:
                raise ShapeError(f"{name}: initial state {tuple(state.shape)}: expected {expected}")
            if state.dtype != x.dtype:
                raise DtypeError(f"{name}: initial state of {state.dtype} for an input of {x.dtype}")
            states[i] = state if batched else state.unsqueeze(1)
        return states


def _reset_uniform(module: Layer, hidden_size: int) -> None:
    """Draws all parameters as PyTorch does by default: uniformly from [-b, b], b = 1/sqrt(hidden_size)."""
    bound = 1 / math.sqrt(hidden_size) if hidden_size else 0.0
    for param in module.parameters():
        init.uniform_(param, -bound, bound)


class RNN(_RNNBase):
    """h_t = act(weight_ih @ x_t + bias_ih + weight_hh @ h_(t-1) + bias_hh). nonlinearity: "tanh" or "relu", for act.

    RNN(input_size, hidden_size, num_layers=1, nonlinearity="tanh", bias=True, batch_first=False, dropout=0.0,
    bidirectional=False). dropout: between layers. Source: Elman 1990.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(f"RNN: nonlinearity {nonlinearity!r}: expected 'tanh' or 'relu'")
        options = (num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype)
        super().__init__(f"RNN_{nonlinearity.upper()}", input_size, hidden_size, *options)
        self.nonlinearity = nonlinearity


class LSTM(_RNNBase):
    """Long short-term memory: gates i, f, g, o; c_t = f*c_(t-1) + i*g, h_t = o*tanh(c_t).

    LSTM(input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0, bidirectional=False,
    proj_size=0). With proj_size, h_t = weight_hr @ (o*tanh(c_t)).

    Source: Hochreiter and Schmidhuber 1997; with proj_size, Sak et al. 2014, arXiv:1402.1128.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__("LSTM", *sizes, **options)


class GRU(_RNNBase):
    """Gated recurrent units: gates r, z, n; h_t = (1 - z)*n + z*h_(t-1).

    GRU(input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0, bidirectional=False).
    Source: Cho et al. 2014, arXiv:1406.1078.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__("GRU", *sizes, **options)


class _RNNCellBase(Layer, shown="input_size hidden_size", usual={"bias": True}):
    """The base of the cells. weight_ih: (G*H, input_size), weight_hh: (G*H, H), bias_ih, bias_hh: (G*H,)."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, num_chunks: int, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        gate_size = num_chunks * hidden_size
        self._register_empty(device, dtype, weight_ih=(gate_size, input_size), weight_hh=(gate_size, hidden_size))
        self._register_empty(device, dtype, **dict.fromkeys(("bias_ih", "bias_hh"), (gate_size,) if bias else None))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights and biases uniformly from [-b, b], b = 1/sqrt(hidden_size)."""
        _reset_uniform(self, self.hidden_size)

    def _step(self, mode: str, input: Tensor, states: list[Tensor | None]) -> list[Tensor]:
        """Computes the next states, (N, H) or (H,). Raises: ShapeError, DtypeError, DeviceError."""
        name = type(self).__name__
        if input.ndim not in (1, 2) or input.shape[-1] != self.input_size:
            wanted = f"(N, {self.input_size}) or ({self.input_size},)"
            raise ShapeError(f"{name}: input {tuple(input.shape)}: expected {wanted}")
        shape = (*input.shape[:-1], self.hidden_size)
        rows = input.unsqueeze(0) if input.ndim == 2 else input.reshape((1, 1, self.input_size))
        initial = []
        for state in states:
            if state is None:
                state = zeros(shape, dtype=input.dtype, device=input.device)
            elif tuple(state.shape) != shape:
                raise ShapeError(f"{name}: state {tuple(state.shape)} for input {tuple(input.shape)}: expected {shape}")
            initial.append(state if input.ndim == 2 else state.unsqueeze(0))
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, None]
        _, *new_state = _run_layer(mode, rows, tuple(initial), weights)
        return new_state if input.ndim == 2 else [x.squeeze(0) for x in new_state]


class RNNCell(_RNNCellBase, usual={"bias": True, "nonlinearity": "tanh"}):
    """act(weight_ih @ input + bias_ih + weight_hh @ hx + bias_hh). nonlinearity: "tanh" or "relu", for act."""

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


class _GatedCell(_RNNCellBase):
    _mode: ClassVar[str]

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, GATES[self._mode], device, dtype)


class LSTMCell(_GatedCell, mode="LSTM"):
    """One step of an LSTM, gates in the order i, f, g, o."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """input: (N, input_size) or (input_size,); hx: state and cell state, zeros if None; returns the next hx."""
        h, c = self._step(self._mode, input, [None, None] if hx is None else list(hx))
        return h, c


class GRUCell(_GatedCell, mode="GRU"):
    """One step of a GRU, gates in the order r, z, n."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """input: (N, input_size) or (input_size,); hx: (N, H) or (H,), zeros if None; returns the next hx."""
        return self._step(self._mode, input, [hx])[0]
