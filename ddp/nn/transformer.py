"""Transformer layers and stacks of them.

Source: Vaswani et al. 2017, arXiv:1706.03762; norm_first: Xiong et al. 2020, arXiv:2002.04745.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar

from ddp._tensor.core import Tensor
from ddp._tensor.creation import full, ones
from ddp._tensor.dtypes import bool_
from ddp.errors import ArgumentError
from ddp.nn import init
from ddp.nn.activation import GELU, ReLU, gelu, relu
from ddp.nn.attention import MultiheadAttention
from ddp.nn.containers import ModuleList
from ddp.nn.dropout import Dropout
from ddp.nn.linear import Linear, feed_forward, linear_act
from ddp.nn.module import Layer, Module
from ddp.nn.normalization import LayerNorm

Activation = Callable[[Tensor], Tensor]


def _parse_activation(activation: str | Activation) -> Activation:
    if not isinstance(activation, str):
        return activation
    if activation not in ("relu", "gelu"):
        raise ArgumentError(f"activation {activation!r}: expected 'relu', 'gelu' or a function")
    return relu if activation == "relu" else gelu


def _fusable(activation: Activation) -> dict[str, str] | None:
    """The activation as arguments of `feed_forward`; None if it cannot be fused, or has hooks."""
    if activation is relu or (type(activation) is ReLU and activation._hooks_ is None):
        return {"activation": "relu"}
    if type(activation) is GELU and activation.approximate == "tanh" and activation._hooks_ is None:
        return {"activation": "gelu", "approximate": "tanh"}
    return None


class _TransformerLayer(Layer):
    """Attention, in a decoder twice, and then a feed-forward net. Each part has dropout, a residual sum and LayerNorm.

    The parts have PyTorch's names and order.
    """

    _attentions: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        for name in self._attentions:
            attention = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **factory)
            self.add_module(name, attention)
        self.linear1 = Linear(d_model, dim_feedforward, bias, **factory)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **factory)
        self.norm_first = norm_first
        numbers = range(1, len(self._attentions) + 2)
        for i in numbers:
            self.add_module(f"norm{i}", LayerNorm(d_model, layer_norm_eps, bias=bias, **factory))
        for i in numbers:
            self.add_module(f"dropout{i}", Dropout(dropout))
        self.activation = _parse_activation(activation)

    def _residual(self, number: int, x: Tensor, part: Activation) -> Tensor:
        """x + dropout(part(x)), normalized before the part or after the sum. number: 1 for norm1 and dropout1"""
        norm = getattr(self, f"norm{number}")
        dropout = getattr(self, f"dropout{number}")
        if self.norm_first:
            return x + dropout(part(norm(x)))
        result: Tensor = norm(x + dropout(part(x)))
        return result

    def _feed_forward(self, x: Tensor) -> Tensor:
        """linear2(dropout(activation(linear1(x)))). On a GPU, plain layers without hooks are fused."""
        first = self.linear1
        second = self.linear2
        dropout = self.dropout
        fused = None if x.device.type == "cpu" else _fusable(self.activation)
        if fused is None or any(type(layer) is not Linear or layer._hooks_ is not None for layer in (first, second)):
            return second(dropout(self.activation(first(x))))
        if type(dropout) is Dropout and dropout._hooks_ is None and not (dropout.training and dropout.p):
            return feed_forward(x, first.weight, first.bias, second.weight, second.bias, **fused)
        return second(dropout(linear_act(x, first.weight, first.bias, **fused)))


class TransformerEncoderLayer(_TransformerLayer, attentions=("self_attn",)):
    """Self-attention, then a feed-forward net: linear1, activation, linear2.

    Each of the two parts has dropout, a residual sum and a LayerNorm.

    d_model: the width; nhead: heads of attention; dim_feedforward: the width between the linear layers.
    activation: "relu", "gelu" or a function. norm_first: normalises the input of each part, not the sum after it.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src: (S, N, d_model), N first if batch_first, or no N; masks: as in MultiheadAttention.

        Returns a tensor of src's shape.
        """

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal)[0]

        return self._residual(2, self._residual(1, src, attend), self._feed_forward)


class TransformerDecoderLayer(_TransformerLayer, attentions=("self_attn", "multihead_attn")):
    """Self-attention, attention to an encoder's result, then a feed-forward net; see TransformerEncoderLayer."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """tgt: (T, N, d_model), memory: (S, N, d_model), N first if batch_first, or no N.

        Returns a tensor of tgt's shape.
        """

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal)[0]

        def attend_to_memory(x: Tensor) -> Tensor:
            padding = memory_key_padding_mask
            mask = memory_mask
            return self.multihead_attn(x, memory, memory, padding, False, mask, is_causal=memory_is_causal)[0]

        tgt = self._residual(2, self._residual(1, tgt, attend), attend_to_memory)
        return self._residual(3, tgt, self._feed_forward)


class _Stack(Module):
    def __init__(self, layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm


class TransformerEncoder(_Stack):
    """num_layers copies of encoder_layer in a row, and `norm` after the last.

    enable_nested_tensor, mask_check: accepted, and ignored: there are no nested tensors here.
    """

    def __init__(
        self,
        encoder_layer: Module,
        num_layers: int,
        norm: Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """src and masks: as in TransformerEncoderLayer. is_causal: whether mask is causal; None: detected from it."""
        causal = _is_causal_mask(mask) if is_causal is None else is_causal
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=causal)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(_Stack):
    """num_layers copies of decoder_layer in a row, and `norm` after the last."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Arguments: as in TransformerDecoderLayer.

        tgt_is_causal: whether tgt_mask is causal; None: detected from it
        """
        causal = _is_causal_mask(tgt_mask) if tgt_is_causal is None else tgt_is_causal
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, causal, memory_is_causal)
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder and a decoder with a LayerNorm after each, or custom_encoder and custom_decoder in their place.

    The other arguments: as in the layers. Source: Vaswani et al. 2017, arXiv:1706.03762.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = relu,
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        factory = {"device": device, "dtype": dtype}

        def norm() -> Module:
            return LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)

        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(*options, **factory), num_encoder_layers, norm()
        )
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(*options, **factory), num_decoder_layers, norm()
        )
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first
        for param in self.parameters():
            if param.ndim > 1:
                init.xavier_uniform_(param)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """src: (S, N, d_model), tgt: (T, N, d_model), N first if batch_first, or no N.

        Returns a tensor of tgt's shape.
        """
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        return self.decoder(tgt, memory, *masks, tgt_is_causal, memory_is_causal)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """Returns a mask (sz, sz): 0 on and below the diagonal, -inf above it."""
        return full((sz, sz), -math.inf, device=device, dtype=dtype).triu(1)


def _is_causal_mask(mask: Tensor | None) -> bool:
    """Whether `mask`, (L, L), hides exactly the keys after each query. If so, attention need not read the mask."""
    if mask is None or mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        return False
    if mask.dtype == bool_:
        causal = ones(mask.shape, dtype=bool_, device=mask.device).triu(1)
    else:
        causal = Transformer.generate_square_subsequent_mask(mask.shape[0], mask.device, mask.dtype)
    return bool((mask == causal).all())
